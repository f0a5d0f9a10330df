"""The commands' options: their types and what `--help` says of them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Exit, Option

from engine.config import DtypeName, Quantization


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"minserve {version('minserve')}")
        raise Exit()


# Each value of a repeatable option; of itself the library would show the list's type.
TEXT, NUMBER = "<str>", "<int>"

# Without a command
Version = Annotated[
    bool, Option("--version", callback=_print_version, is_eager=True, help="Show it.")
]

# Of several commands
Model = Annotated[str, Option(help="A bundled name, a folder or a Hugging Face repo id.")]
Device = Annotated[str, Option(help='"auto", "cpu", "cuda" or "cuda:N".')]
Dtype = Annotated[
    str,
    Option(
        help='"float32", "bfloat16", "float16"; "auto": as stored, '
        "or float32 on a CPU without AVX-512 BF16."
    ),
]
Quantize = Annotated[str, Option(help='Of the weights, at load: "none", "int8" or "fp8".')]
Deterministic = Annotated[
    bool, Option("--deterministic", help="The same bits whatever else is read beside a text.")
]
Threads = Annotated[int | None, Option(help="CPU threads; default: as many as may be used.")]

# serve: None leaves a setting to its environment variable or its default
Host = Annotated[str | None, Option(help="Address to listen at [127.0.0.1].")]
Port = Annotated[int | None, Option(help="0 = any free one [8000].")]
Uds = Annotated[
    Path | None, Option(help="A unix socket to listen at, in place of host and port [none].")
]
ServedModel = Annotated[
    str | None, Option(help="A bundled name, a folder or a hub repo id [shakespeare-mingru].")
]
ModelName = Annotated[str | None, Option(help="What clients call the model [its own name].")]
ServedDevice = Annotated[str | None, Option(help="auto, cpu, cuda or cuda:N [auto].")]
ServedDtype = Annotated[str | None, Option(help="auto, float32, bfloat16 or float16 [auto].")]
ServedQuantize = Annotated[
    str | None, Option(help="Weights in 8 bits: none (as stored), int8 or fp8 [none].")
]
MaxSlots = Annotated[int | None, Option(help="Sequences that run at once [256].")]
MaxWaiting = Annotated[int | None, Option(help="Requests in the queue [4096].")]
MaxWaitingTokens = Annotated[int | None, Option(help="Prompt tokens in the queue [2**26].")]
MaxStepTokens = Annotated[
    int | None, Option(help="Prompt tokens read in one step [128; on a GPU 8192].")
]
ShareSlots = Annotated[
    int | None, Option(help="Cached and kept states that lie on the device [64].")
]
HostStateBytes = Annotated[
    int | None, Option(help="Of states in main memory [a quarter of what is free, up to 2**32].")
]
StateFolder = Annotated[
    Path | None, Option(help="Where kept states and sessions survive a restart [nowhere].")
]
StateSync = Annotated[
    str | None,
    Option(
        help="When a state is stored there, for which its answer waits: write (a restart finds "
        "it) or fsync (after a loss of power, too) [write]."
    ),
]
DiskStateBytes = Annotated[int | None, Option(help="Of states in that folder [2**36].")]
DiskCacheBytes = Annotated[
    int | None, Option(help="Of cached prompts and answers there [0: none].")
]
StateTtl = Annotated[
    float | None, Option(help="Seconds after its last use that a state is kept [86400].")
]
MaxStates = Annotated[int | None, Option(help="Most states kept for one key [2**17].")]
CudaGraphs = Annotated[bool | None, Option(help="Replay steps and short prompts as graphs [yes].")]
ServedDeterministic = Annotated[
    bool | None, Option(help="A text's logits do not depend on its company, bit for bit [no].")
]
TuningCache = Annotated[
    str | None,
    Option(
        help="Where the kernels that were the quickest on a GPU are kept for the next start: auto "
        "(~/.cache/minserve), off, or a folder [auto]."
    ),
]
MaxTokens = Annotated[int | None, Option(help="Most that one prompt may generate [1000000].")]
MaxPrompts = Annotated[int | None, Option(help="Most prompts of one request [1024].")]
MaxBodyBytes = Annotated[int | None, Option(help="Of the largest request, in bytes [2**24].")]
StreamInterval = Annotated[
    int | None, Option(help="Tokens of one event of a stream, if a request names none [1].")
]
LoadTimeout = Annotated[float | None, Option(help="Seconds for the model to load [600].")]
RequestTimeout = Annotated[float | None, Option(help="Seconds, if a request names none [600].")]
MaxRequestTimeout = Annotated[float | None, Option(help="Most that a request may name [3600].")]
DrainTimeout = Annotated[
    float | None, Option(help="Seconds for what is in flight at shutdown [30].")
]
KeepAliveTimeout = Annotated[
    float | None,
    Option(help="Seconds that idle connections stay open; more than a proxy's in front [75]."),
]
Engines = Annotated[
    int | None,
    Option(
        help="Engines that serve as one, each on a GPU of its own, with as much of everything as "
        "the other options say [1]."
    ),
]
ApiWorkers = Annotated[
    int | None, Option(help="Processes that share the port, in front of the engines [1].")
]
EngineRestarts = Annotated[
    int | None,
    Option(help="How often an engine that died is started again in 10 minutes; 0 = never [3]."),
]
HangTimeout = Annotated[
    float | None,
    Option(help="Seconds after which a process that does not answer is killed; 0 = never [120]."),
]
LogLevel = Annotated[str | None, Option(help="debug, info, warning, error or critical [info].")]

AccessLog = Annotated[
    str | None, Option(help="A line per request on stdout, without texts: json, text, off [off].")
]
Traces = Annotated[
    str | None,
    Option(help="Spans for OpenTelemetry, to where OTEL_* variables say: otlp, off [off]."),
]
ApiKeysFile = Annotated[
    Path | None,
    Option(help="Keys of clients, a name:key [priority=N] per line [anybody may ask]."),
]
AdminKeyFile = Annotated[Path | None, Option(help="The key of administration [there is none].")]
MetricsAccess = Annotated[
    str | None, Option(help="Who may read /metrics: open, key (any) or admin [open].")
]

TlsCertificate = Annotated[
    Path | None, Option(help="PEM file with the chain; serves HTTPS [plain HTTP].")
]
TlsKey = Annotated[Path | None, Option(help="PEM file, without passphrase [in the certificate's].")]
Playground = Annotated[bool | None, Option(help="A page to try the model with, at / [yes].")]
CorsOrigin = Annotated[
    list[str] | None,
    Option(
        help="Whose pages in browsers may ask: https://HOST or *; repeatable [nobody's].",
        metavar=TEXT,
    ),
]

# generate
Temperature = Annotated[float, Option(help="0 = always the most likely token.")]
OffAtZero = Annotated[float, Option(help="0 = off.")]
OffAtOne = Annotated[float, Option(help="1 = off.")]
TopK = Annotated[int, Option(help="0 or -1 = off.")]
TopP = Annotated[float, Option(help="1 = off; 0 = always the most likely token.")]
Stop = Annotated[
    list[str] | None, Option(help="A string that ends the text; repeatable.", metavar=TEXT)
]
IgnoreEos = Annotated[bool, Option("--ignore-eos", help="Go on after an end of text.")]
Seed = Annotated[
    int | None, Option(help="From -2**63 to 2**63 - 1; default: another one each time.")
]
Echo = Annotated[bool, Option("--echo", help="Write the prompt first.")]

# score
Json = Annotated[bool, Option("--json", help="Print one JSON object.")]

# train
Data = Annotated[Path, Option(help="UTF-8 text; its last tenth is the test text.")]
Out = Annotated[Path, Option(help="Folder of the checkpoint and, until then, of the run's state.")]
Expansion = Annotated[float, Option(help="Inner width over d-model.")]
ConvKernel = Annotated[int, Option(help="0 = no convolution.")]
MlpRatio = Annotated[float, Option(help="MLP width over d-model; 0 = no MLP.")]
TieEmbeddings = Annotated[bool, Option("--tie-embeddings", help="The head is the embedding.")]
LearnedInitialState = Annotated[bool, Option("--learned-initial-state", help="h_0 is trained.")]
Batch = Annotated[int, Option(help="Windows per step.")]
Window = Annotated[int, Option(help="Tokens per window.")]
Warmup = Annotated[int, Option(help="Steps in which the learning rate rises from 0.")]
FinalLearningRate = Annotated[float, Option(help="Where the cosine ends.")]
WeightDecay = Annotated[float, Option(help="Of matrices.")]
Clip = Annotated[float, Option(help="Of the gradient's norm; 0 = off.")]
Ema = Annotated[float, Option(help="Decay of averaged weights, which are then kept; 0 = off.")]
EverySteps = Annotated[int, Option(help="Steps.")]
WrittenDtype = Annotated[DtypeName, Option(help="Of the written weights.")]
TrainingTokenizer = Annotated[
    Path | None, Option(help="A tokenizer.json; without it, a token is a byte.")
]
EndOfText = Annotated[str, Option(help="The tokenizer's end-of-text token, if it has it.")]
SamplePrompt = Annotated[str, Option(help="Of the sample in the README [a newline].")]
Compile = Annotated[bool, Option("--compile", help="Use torch.compile.")]
Resume = Annotated[bool, Option("--resume", help="Go on with the run in --out.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace the run in --out.")]

# convert
NormalizeGates = Annotated[bool | None, Option(help="Of a minLSTM: weights do not show it.")]
NormEps = Annotated[float | None, Option(help="Of the norms [what the project uses].")]
ConvertedTokenizer = Annotated[Path | None, Option(help="A tokenizer.json to go with it.")]
EosTokenId = Annotated[
    list[int] | None,
    Option(help="An id that ends a text; repeatable [as the source says].", metavar=NUMBER),
]
ConvertedDtype = Annotated[DtypeName | None, Option(help="Of the written weights [as they are].")]
ConvertedQuantize = Annotated[Quantization | None, Option(help="Write 8-bit weights [no].")]


def describe(error: Mapping[str, Any], options: Container[str]) -> str:
    """One of pydantic's error details about a setting, named as an option, if it is one of these,
    and as a variable."""
    name = str(error["loc"][0])
    where = f"MINSERVE_{name.upper()}"
    if name in options:
        where = f"--{name.replace('_', '-')} ({where})"
    return f"{where} is {error['input']!r}: {error['msg']}"
