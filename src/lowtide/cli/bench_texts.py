"""The help of ``lowtide bench``: what each benchmark measures, and examples."""

BENCH = """\
Measure lowtide beside its peers: those that can be imported here, in one run. The figures are printed and written to a
json file in the folder at hand (--output), with the hardware and the versions."""

BENCH_EXAMPLES = """\
examples:
  lowtide bench head
      the loss at sizes for a GPU
  lowtide bench head --shape 1024,256,8192 --skip compile --device cpu
      a small one, on any machine
  lowtide bench WHAT --help
      all options of one, with examples"""

HEAD = """\
Time, peak memory and errors of linear + cross entropy, forward and backward, of lowtide and of everyone who can be
imported, in one process and interleaved with the limit: the bare GEMMs over chunks of 2048, 4096 or all rows,
whichever is fastest. Peaks are above the inputs and include the gradients; errors are against exact products in a wider
dtype. A peer that fails is a row that says why. The result is DIR/<date>-head-<gpu>.json with the hardware and the
versions; set COMMIT in the environment where the source has no git history. Exit status 1 where lowtide itself
failed."""

HEAD_EXAMPLES = """\
examples:
  lowtide bench head --sweep
      one shape with everyone, and the picture of time against memory
  lowtide bench head --shape all
      the table of all named shapes
  lowtide bench head --shape 4096,2048,50304 --only lowtide liger --no-error
      a shape of your own, two peers, times and peaks alone
  lowtide bench head --no-table --settings
      other uses of the loss, each beside its own limit
  lowtide bench head --no-table --tokens all
      from 1024 to 262144 tokens
  lowtide bench head --shape 1024,256,8192 --skip compile --device cpu
      a look at it without a GPU"""

SWEEP = """\
Rate, peak memory and errors of linear + cross entropy, forward and backward, over the number of tokens N, the hidden
size D and the vocabulary V, each with the other two held, of lowtide and its peers: the measuring of lowtide bench
head, shape by shape, drawn as nine panels. The rate is 6NDV over the time, whatever a peer computes besides. How long
it will take is said first. The result is DIR/<date>-sweep-<gpu>.json, with the picture beside it, written after each
row: a run that was ended goes on when the same command runs again. Exit status 1 where lowtide itself failed, other
than for want of memory."""

SWEEP_EXAMPLES = """\
examples:
  lowtide bench sweep
      around 16384 tokens, hidden size 2048, vocabulary 131072
  lowtide bench sweep --tokens 1024 2048 4096 8192 16384 32768 --hidden 512 1024 2048 4096 --vocab 8192 32768 131072
      lines of your own
  lowtide bench sweep --shape gemma-2b --hidden none --only lowtide liger liger-large --seconds 60
      two lines around another shape, so much of them as a minute has room for
  lowtide bench sweep --shape 256,64,2048 --skip compile --device cpu
      a look at it without a GPU"""

STATS = """\
Time, peak memory and errors of the log-probability of each token's target, with the entropy and without, and of
several targets, forward and backward with random upstream gradients; of backward alone; and without gradients of
these, of all other statistics and of the highest logits, of lowtide and of everyone who can be imported, in one
process and interleaved with the limit: the bare GEMMs (with gradients four, as no logits are kept, for
backward alone three; else one) over chunks of 2048, 4096 or all rows, whichever is fastest. Peaks are above the
inputs and include the gradients; errors are against float32 products. A peer that fails, or does not offer the work,
is a row that says why. The result is DIR/<date>-stats-<gpu>.json with the hardware and the versions; set COMMIT in
the environment where the source has no git history. Exit status 1 where lowtide itself failed."""

STATS_EXAMPLES = """\
examples:
  lowtide bench stats
      8192 tokens of a Qwen's head with everyone
  lowtide bench stats --work logprob-entropy --only lowtide trl
      one table with two peers
  lowtide bench stats --shape 64,32,1000 --device cpu --skip compile
      a look at it without a GPU"""

DIVERGENCE = """\
Time, peak memory and errors of a student's mean divergence from a teacher, forward and backward for the student:
forward KL, reverse KL and JSD(0.5), of lowtide and of everyone who can be imported, in one process and interleaved with
the limit: the bare GEMMs, the logits of both sides and the student's two gradients. lowtide's first row is
of the mean, lowtide-none of a value for each token. Peaks, errors and rows are those of lowtide bench stats. The result
is DIR/<date>-divergence-<gpu>.json. Exit status 1 where lowtide itself failed."""

DIVERGENCE_EXAMPLES = """\
examples:
  lowtide bench divergence --shape all
      a Llama of 8B teaches one of 1B, and one of its own size
  lowtide bench divergence --shape 8192,1024,151936,2560 --work jsd
      shapes of your own: tokens, student's hidden size, vocabulary, teacher's hidden size
  lowtide bench divergence --shape 64,32,1000,48 --device cpu --skip compile liger-chunked
      a look at it without a GPU"""

APPLY = """\
Peak memory, time and errors of functions of the logits, forward and backward: with float32 logits in full, and with
linear_apply in two chunks, by default, and with one result a token. Peaks are above the inputs and include the
gradients; errors of value and gradients (hidden states, weight, bias) are against autograd on exact products in a wider
dtype. The result is DIR/<date>-apply-<gpu>.json with the hardware and the versions; set COMMIT in the environment where
the source has no git history. Exit status 1 where linear_apply failed."""

APPLY_EXAMPLES = """\
examples:
  lowtide bench apply --shape all
      batch 4, 4096 tokens, hidden size 4096, vocabulary 128256; and batch 64, 512 tokens, 768, 32000
  lowtide bench apply --shape 256,64,4096 --device cpu
      a look at it without a GPU
  lowtide bench apply --no-table --train --grpo
      50 steps of a Llama of 1B, with the stock loss and linear_apply; then with GRPO's objective"""

LAYERS = """\
Time and bandwidth of what stands between a decoder layer's matrix products, forward and backward: RMS normalisation,
the same with a residual sum before it, and rotary embedding, by lowtide, PyTorch (eager, compiled, its own fused
operation) and Liger. GB/s counts what has to be read and written, not what is. "kept" is what stays for backward beyond
inputs and the residual stream. The result is DIR/<date>-layers-<gpu>.json. Exit status 1 where lowtide failed."""

LAYERS_EXAMPLES = """\
examples:
  lowtide bench layers
      65536 tokens of a Llama-3.2-1B
  lowtide bench layers --hidden 4096 --head-dim 128
      of a Llama-3-8B
  lowtide bench layers --tokens 256 --hidden 64 --device cpu
      a look at it without a GPU"""

STEP = """\
Time, peak memory and loss of one step of full fine-tuning: forward, backward and fused AdamW, by transformers as it is,
with Liger's kernels, under torch.compile, and patched by lowtide with each activation policy. A peer's layers are
checkpointed; NAME-attention keeps attention's output, NAME-all keeps everything. Each way is a process of its own. The
last column is the time over that of the first way. The result is DIR/<date>-step-<gpu>.json with the hardware and the
versions. Exit status 1 where lowtide itself failed, other than for want of memory."""

STEP_EXAMPLES = """\
examples:
  lowtide bench step
      a Llama-3.2-1B at three lengths
  lowtide bench step --tokens 32768 --peer liger --policy all 8xall+8xattention-mlp1 --sdpa cudnn
      what a layer keeps, mixed
  lowtide bench step --tokens 32768 --peer liger --policy 10xattention-mlp0+6xall@states
      with the optimizer's states in host memory while nobody needs them
  lowtide bench step --model lowtide-small --tokens 64 --device cpu --peer stock --policy all input
      a look at it without a GPU"""

LONGEST = """\
Tokens a second at one length, and the longest sequence that runs, of a large model on one GPU: full training with
parameters, gradients and AdamW's states in host memory (FSDP2's CPU offload in a world of one), or LoRA; by lowtide,
whose layers keep their inputs in pinned host memory as far as there is room and on the GPU beyond, and by
transformers' checkpointing, with Liger's kernels or without, its checkpoints on the GPU or offloaded. Each try is a
process of its own; the search begins where the planner says that memory ends. Memory that runs out, on the GPU or on
the host, is a result: what should not fit into the host is not tried, and a try is ended before the host has none left.
The result is DIR/<date>-longest-<gpu>.json, written after each try. Exit status 1 where lowtide itself failed, other
than for want of memory or time."""

LONGEST_EXAMPLES = """\
examples:
  lowtide bench longest --no-search
      the rate of a Llama of 8B at 32768 tokens, every parameter trained
  lowtide bench longest --train lora --way lowtide --tokens 0 --seconds 3600
      how long a sequence can be with adapters
  lowtide bench longest --layers 4 --way lowtide --start 262144 --sdpa cudnn
      a look at the GPU's side of it in less time
  lowtide bench longest --model lowtide-small --device cpu --way lowtide stock --tokens 256 --start 512 --seconds 60
      a look at it without a GPU"""

MLP = """\
Time and memory of the gated MLP of today's transformers, forward and backward, at both levels of swiglu_mlp and of
everyone who can be imported, in one process and interleaved with the limit: the bare GEMMs, 9 a layer, or 11
where gate and up are computed twice. "kept" is what is alive after forward for backward's sake, the input counted;
peaks are above input and weights and include the gradients; "all" is everything, and "again" the same of a step that
adds to the gradients of the one before. A peer that fails is a row that says why. The result is
DIR/<date>-mlp-<dtype>-<gpu>.json with the hardware and the versions; set COMMIT in the environment where the source has
no git history. Exit status 1 where lowtide itself failed."""

MLP_EXAMPLES = """\
examples:
  lowtide bench mlp --shape models
      a layer of a Llama of 8B and of 70B, at 8192 and 32768 tokens
  lowtide bench mlp --shape published --dtype float32
      the table of a published exercise, in its dtype
  lowtide bench mlp --shape 2,64,32,96,2 --device cpu --skip compile
      a look at it without a GPU"""

MODELS = """\
What lowtide.patch does to every model type that transformers knows: a tiny model with random weights of each, stock
beside patched, float32 on the CPU; loss and every gradient are compared, and logits watched for. A type is "fused" (no
logits were built), "fell back" (they were, with the reason, and all was equal), "not built" (no tiny model of it could
be made or run; with the reason), "crashed", "timed out", or "different", which is a defect of lowtide. Each is one
process. The result is DIR/<date>-models-cpu.json, written after each type. Exit status 1 where one is different."""

MODELS_EXAMPLES = """\
examples:
  lowtide bench models --only llama gemma2 t5
      a few types
  lowtide bench models --table docs/supported-models.md --output benchmarks/results
      all of them, and the page of the documents
  lowtide bench models --resume 2026-11-21-models-cpu.json
      go on with a result that was interrupted"""

TUNE = """\
Find the tile sizes with which the exponential path's GEMM is fastest on this machine's GPU, for GPUs that lowtide's own
table does not know. It serves every head that takes that path, but for one without bias, scale and soft cap on Hopper,
which has a kernel of its own. Each candidate is compiled, its result checked against float32 products, and timed in
turns with torch.mm of the same shape; the first is what is in use now. The fastest is kept in
$XDG_CACHE_HOME/lowtide/gemm.json (~/.cache without it), where every later run looks before the table. Exit status 1
where no candidate ran and was right."""

TUNE_EXAMPLES = """\
examples:
  lowtide bench tune
      a minute at most, and this GPU is known from then on
  lowtide bench tune --dry-run --seconds 20
      a look at the first candidates, and nothing is kept
  lowtide bench tune --shape 4096,4096,128256
      for the chunks of a large model"""
