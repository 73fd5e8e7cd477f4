"""Random programs around a model: what users write, statement by statement."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

from programs.families import NAMES, OWN


def read_statements() -> dict[str, tuple[str, ...]]:
    """Return the entries of each section of ``statements.txt``, what programs are made of."""
    sections: dict[str, list[str]] = {}
    entries: list[str] = []
    for line in Path(__file__).with_name("statements.txt").read_text().splitlines():
        if section := re.match(r"\[([a-zA-Z ]+)\]", line):
            entries = sections.setdefault(section[1], [])
        elif line.startswith(("    ", "& ")):
            entries[-1] += "\n" + line.removeprefix("& ")
        elif line and not line.startswith("#"):
            entries.append(line)
    return {name: tuple(entries) for name, entries in sections.items()}


STATEMENTS = read_statements()
FORMS = tuple(tuple(entry.split(" | ")) for entry in STATEMENTS["forms"])


@dataclass(frozen=True)
class Program:
    """A program.

    Args:
        seed: What it was made from.
        statements: Its text, a statement each.
    """

    seed: int
    statements: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.statements)


_LLAMA_LIKE = ("llama", "qwen3", "gemma2", "cohere", "granite")
_BATCHES = ("", "", "", "", "", ", 1, 5", ", 3, 4", ", 1, 1", ", 2, 1", ", 1, 2", ", 2, 12")
_OF_TRANSFORMERS = ("config", "attn_implementation", "resize", "tie_weights", "loss_function", "set_output")


class Writer:
    """Writes one program from a random source."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.name = self.random.choice(NAMES)
        self.own = self.name in OWN
        self.forwards = "forwards of own" if self.own else "forwards"
        self.adapted = self.second = self.recomputes = False
        self.autocast = False
        self.labelled = self.differentiable = True  # the last forward
        self.dtype = self.random.choices(("float32", "bfloat16", "float64"), (80, 12, 8))[0]

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def one(self, texts: tuple[str, ...]) -> str:
        return self.random.choice(texts)

    def pick(self, section: str) -> str:
        return self.one(STATEMENTS[section])

    def add(self, text: str, *contexts: str) -> None:
        text = text.replace("HEAD", "model.get_output_embeddings()").replace("LAYER", "layer(model)")
        for context in contexts:
            text = f"with {context}:\n" + "\n".join("    " + line for line in text.split("\n"))
        self.lines.append(text)

    # -- the parts of a program

    def model(self) -> None:
        self.add(f"model = build('{self.name}', torch.{self.dtype})")
        self.add("scale, shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(V))")
        self.add(f"x, y = batch({self.random.randrange(1000)}{self.one(_BATCHES)})")
        if self.chance(0.2):
            self.add(self.pick("labels"))
        if self.chance(0.25):
            self.around()
        if not self.own and self.chance(0.12):
            self.adapters()
        self.add(self.pick("patches"))
        if self.chance(0.1):
            self.recomputes = True
            has_mlp = self.name.split("-")[0] in (*_LLAMA_LIKE, "own") and "mlp=False" not in self.lines[-1]
            self.add(self.pick("policies of MLPs" if has_mlp and self.chance(0.6) else "policies"))
        if not self.own and self.chance(0.1):
            self.adapters()
        if self.chance(0.3):
            self.around()
        self.autocast = self.chance(0.12)

    def adapters(self) -> None:
        if self.adapted:
            return
        self.adapted = True
        family = self.name.split("-")[0]
        body = ("q_proj", "up_proj", "gate_proj", "down_proj") if family in _LLAMA_LIKE else ()
        body = {"gpt2": ("c_attn", "c_proj"), "opt": ("q_proj", "fc1"), "phi": ("q_proj", "fc1")}.get(family, body)
        on = [one for one in body if self.chance(0.6)] + (["lm_head"] if self.chance(0.4) else [])
        more = self.one(
            ("", "", "", ", use_rslora=True", ", modules_to_save=['lm_head']", ", lora_bias=True", ", use_dora=True")
        )
        if "lm_head" in on and "modules_to_save" in more:
            on.remove("lm_head")
        config = f"peft.LoraConfig(r=2, target_modules={on or [body[0]]}, init_lora_weights=False{more})"
        self.add(f"model = peft.get_peft_model(model, {config})")
        self.second = self.chance(0.25)
        if self.second:
            self.add(f"model.add_adapter('second', {config.replace('r=2', 'r=3')})")
            if self.chance(0.5):
                self.add("model.set_adapter('second')")

    def adapter_change(self) -> None:
        self.add(self.pick("second adapters" if self.second and self.chance(0.4) else "adapters"))

    def around(self) -> None:
        """Something changed of the model or around it."""
        kind = self.random.choices(
            ("freezing", "weights", "tree", "hooks", "replaced", "settings", "adapters", "checkpointing", "patch",
             "read"),
            (3, 3, 3, 5, 5, 2, 4 if self.adapted else 0, 0 if self.own else 1, 2, 1),
        )[0]  # fmt: skip
        if kind == "adapters":
            self.adapter_change()
        elif kind == "checkpointing":
            self.recomputes = True
            how = self.one(("", "{'use_reentrant': False}", "{'use_reentrant': True}"))
            self.add(f"model.gradient_checkpointing_enable({how})\nmodel.enable_input_require_grads()")
        elif kind == "patch":
            self.add(self.pick("patching again"))
        elif kind == "read":
            self.add("see(model(input_ids=x, labels=y).loss)", *self.contexts())
        else:
            self.add(self.one(tuple(text for text in STATEMENTS[kind] if self.fits(text))))

    def fits(self, text: str) -> bool:
        """Whether a change is one that can be made to this model."""
        if self.own and any(word in text for word in _OF_TRANSFORMERS):
            return False
        return ("rope" not in text and "rotate" not in text) or self.name.split("-")[0] in (*_LLAMA_LIKE, "phi")

    def contexts(self) -> list[str]:
        return [*(["torch.autocast('cpu', dtype=torch.bfloat16)"] if self.autocast else [])]

    def forward(self) -> None:
        weights, texts = zip(*(entry.split(" | ", 1) for entry in STATEMENTS[self.forwards]), strict=True)
        text = self.random.choices(texts, [int(weight) for weight in weights])[0]
        while self.recomputes and "functional_call" in text:  # a recompute has the module's own weights
            text = self.random.choices(texts, [int(weight) for weight in weights])[0]
        self.labelled = re.search(r"(?<![a-z_])labels=y|, y\)", text) is not None
        self.differentiable = "no_grad" not in text.split("out =")[0][-20:] and "inference" not in text
        self.add(f"{text}\nz = out.logits\nyz, C = y[:, -z.size(1):], z.size(-1)", *self.contexts())

    def expression(self, text: str, form: tuple[str, str]) -> str:
        logits, labels = form
        if logits != "z":
            text = text.replace("Z", logits)
        return text.replace("Z", "z").replace("K", f"{labels}.clamp(min=0)").replace("Y", labels)

    def read(self) -> None:
        form = self.random.choice(FORMS)
        rounded = re.search("log(sumexp|_softmax)", form[0])  # read twice it is the same to rounding, not to the bit
        contexts = [self.one(("torch.no_grad()", "torch.inference_mode()"))] if self.chance(0.3) else []
        held = self.one(("z", "out.logits")) if self.chance(0.1) else None
        if held is not None:
            self.add(f"held = {self.expression('Z', form)}", *contexts)
            form = ("held", form[1])
        text = self.pick("values")
        while rounded and text.count("Z") > 1:
            text = self.pick("values")
        self.add(f"see({self.expression(text, form)})", *contexts)

    def in_place(self) -> None:
        self.add(self.pick("in place") + self.one(("", "\nsee(z)", "\nsee(out.logits)")))

    def loss(self) -> str:
        """Return the expression of a loss."""
        if self.labelled and self.chance(0.4):
            return "out.loss"
        form = self.random.choice(FORMS)
        if "detach" in form[0] or "data" in form[0]:
            form = ("z", "yz")
        own = self.expression(self.pick("losses"), form)
        if self.labelled and self.chance(0.3):
            return self.one((f"out.loss + 0.1 * ({own})", f"({own}) * 0.5 + out.loss"))
        return own

    def backward(self) -> None:
        if self.chance(0.04):
            inputs = "[p for p in model.parameters() if p.requires_grad]"
            self.add(f"see(torch.autograd.grad({self.loss()}, {inputs}, allow_unused=True))")
            return
        self.add(f"loss = {self.loss()}", *(self.contexts() if self.chance(0.7) else []))
        self.add("see(loss)")
        if self.chance(0.12):
            self.read()
        if self.chance(0.07) and not self.recomputes:  # else a layer changes between its forward and its recompute
            self.around()
        how = "loss.backward()" if self.chance(0.6) else self.pick("backward")
        if self.chance(0.8) and ("batched" in how or "create_graph" in how or ("[z]" in how and self.labelled)):
            how = "loss.backward()"  # seldom: lowtide has none of these, and says so
        self.add(how)

    def after(self) -> None:
        kind = self.random.choices(("read", "grad", "clip", "generate", "held", "zero"), (5, 2, 2, 0.7, 1, 2))[0]
        if kind == "read":
            self.read()
        elif kind == "grad":
            self.add("see(z.grad)" if self.chance(0.5) else "see([p.grad is None for p in model.parameters()])")
        elif kind == "clip":
            self.add("see(nn.utils.clip_grad_norm_(model.parameters(), 0.1))")
        elif kind == "generate":
            if self.own:
                return
            self.add("see(model.generate(x[:, :3], max_new_tokens=2, do_sample=False, pad_token_id=0))")
        elif kind == "zero":
            self.add(self.pick("zeroing"))
        else:
            self.add("held, z_held = out, z")

    def step(self) -> None:
        self.forward()
        for _ in range(self.random.choices((0, 1, 2, 3), (40, 35, 18, 7))[0]):
            kind = self.random.choices(("read", "in place", "hook", "around"), (70, 7, 13, 6))[0]
            if kind == "read":
                self.read()
            elif kind == "in place":
                self.in_place()
            elif kind == "hook":
                hook = self.pick("tensor hooks")
                if "out.loss" in hook if self.labelled else "out.loss" not in hook:
                    self.add(hook)
            elif not self.recomputes:
                self.around()
        if self.chance(0.9 if self.differentiable else 0.05):
            self.backward()
        while self.chance(0.35):
            self.after()

    def program(self) -> list[str]:
        self.model()
        self.step()
        while self.chance(0.25):
            if self.chance(0.6):
                self.around()
            self.step()
        return self.lines


# PyTorch 2.13 crashes where a tensor that was changed in place through a view of it gets a hook.
_IN_PLACE = re.compile(r"^\s*(z|row)\b.*(\w_\(|[-+*/\]] ?=)", re.MULTILINE)
_HOOK = re.compile(r"^\s*(z\.register_hook|.*multi_grad_hook\(\W*z\b)", re.MULTILINE)


def make(seed: int) -> Program:
    """Return the program of a seed."""
    statements, in_place = [], False
    for statement in Writer(seed).program():
        in_place = in_place or _IN_PLACE.search(statement) is not None
        if not (in_place and _HOOK.search(statement)):
            statements.append(statement)
    return Program(seed, tuple(statements))
