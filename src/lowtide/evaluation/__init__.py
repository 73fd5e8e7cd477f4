"""How well a model predicts text, and lm-evaluation-harness's tasks, without logits: ``lowtide eval``."""
