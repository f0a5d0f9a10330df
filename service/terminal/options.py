"""Types and help texts of the options of every `minserve` command.

A default in brackets at the end of a help text of `serve` also fills the settings table
(`service.terminal.settings_table`), where the setting itself has no default to show.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Exit, Option

from engine.config import DtypeName, Quantization
from engine.models.minrnn.config import CellName


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"minserve {version('minserve')}")
        raise Exit()


# The placeholder of a repeatable option's value; typer would show the list's type instead.
TEXT, NUMBER, PATH = "<str>", "<int>", "<path>"

# Without a command
Version = Annotated[
    bool, Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
]

# Options of several commands
Model = Annotated[
    str, Option(help="The model: a bundled name, a folder or a Hugging Face repo id.")
]
Device = Annotated[str, Option(help="Where to compute: auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[
    str,
    Option(
        help="What to compute in: float32, bfloat16, float16, or auto: as stored, but float32 on a "
        "CPU without AVX-512 BF16."
    ),
]
Quantize = Annotated[
    str, Option(help="Quantise the weights at load: int8 or fp8; none = use them as stored.")
]
StateDtype = Annotated[
    str,
    Option(
        help="Data type of recurrent states: float32, bfloat16 (Mamba and Mamba-2), or auto: "
        "float32, unless the model says otherwise."
    ),
]
Deterministic = Annotated[
    bool,
    Option("--deterministic", help="Compute the same bits however the text is batched and cut up."),
]
Threads = Annotated[int | None, Option(help="CPU threads; default: all that the process may use.")]

# serve: None leaves a setting to its environment variable or its default
Host = Annotated[str | None, Option(help="Address to listen on [127.0.0.1].")]
Port = Annotated[int | None, Option(help="Port to listen on; 0 = any free port [8000].")]
Uds = Annotated[
    Path | None,
    Option(help="Path of a Unix socket to listen on instead of a host and port [none]."),
]
ServedModel = Annotated[
    str | None,
    Option(
        help="Model to serve: a bundled name, a folder or a Hugging Face repo id [library-mingru]."
    ),
]
ModelName = Annotated[
    str | None, Option(help="Model name in requests and answers [the checkpoint's own name].")
]
ServedDevice = Annotated[
    str | None, Option(help="Device to compute on: auto, cpu, cuda or cuda:N [auto].")
]
ServedDtype = Annotated[
    str | None,
    Option(
        help="Data type to compute in: float32, bfloat16, float16, or auto: as stored, but float32 "
        "on a CPU without AVX-512 BF16 [auto]."
    ),
]
ServedQuantize = Annotated[
    str | None,
    Option(help="Quantise the weights at load: int8 or fp8; none = use them as stored [none]."),
]
ServedStateDtype = Annotated[
    str | None,
    Option(
        help="Data type of recurrent states: float32, bfloat16 (Mamba and Mamba-2), or auto: "
        "float32, unless the model says otherwise [auto]."
    ),
]
MaxSlots = Annotated[
    int | None,
    Option(
        help="Sequences that run at once; the others wait in the queue [256, or as many as fit in "
        "memory]."
    ),
]
MaxWaiting = Annotated[
    int | None, Option(help="Most requests in the queue; more are answered with 429 [4096].")
]
MaxWaitingTokens = Annotated[
    int | None, Option(help="Most prompt tokens in the queue; more are answered with 429 [2**26].")
]
MaxStepTokens = Annotated[
    int | None, Option(help="Most prompt tokens read in one step [128; on a GPU 8192].")
]
ShareSlots = Annotated[
    int | None,
    Option(
        help="Cached and kept states in device memory, beside those of running sequences [64, or "
        "as many as fit]."
    ),
]
HostStateBytes = Annotated[
    int | None,
    Option(
        help="Main memory for cached and kept states, in bytes [a quarter of what is free, up to "
        "2**32]."
    ),
]
StateFolder = Annotated[
    Path | None,
    Option(help="Folder where kept states and sessions survive a restart [memory only]."),
]
StateStore = Annotated[
    str | None,
    Option(
        metavar="URL",
        help="Store of kept states and sessions that several servers share: redis://HOST[:PORT] "
        "(rediss, redis+sentinel, redis+cluster) or file:///FOLDER. Others can read a password "
        "that is given as an option [none].",
    ),
]
StateStoreFile = Annotated[
    Path | None, Option(help="File with the URL of the state store, and its password [none].")
]
StateSync = Annotated[
    str | None,
    Option(
        help="What an answer waits for when a state is stored in a folder: write (the file "
        "survives a restart) or fsync (and a power failure) [write]."
    ),
]
DiskStateBytes = Annotated[
    int | None, Option(help="Most bytes of kept states in the state folder [2**36].")
]
DiskCacheBytes = Annotated[
    int | None,
    Option(help="Most bytes of cached states in the state folder; 0 = none are stored there [0]."),
]
StateTtl = Annotated[
    float | None,
    Option(help="Seconds that a state is kept after its last use, if a request says none [86400]."),
]
MaxStates = Annotated[
    int | None, Option(help="Most states that are kept for one API key name [2**17].")
]
CudaGraphs = Annotated[
    bool | None, Option(help="Run decode steps and short prompts as CUDA graphs [yes].")
]
ServedDeterministic = Annotated[
    bool | None,
    Option(help="Make logits independent of the batch and of prompt chunking, bit for bit [no]."),
]
TuningCache = Annotated[
    str | None,
    Option(
        help="Where GPU autotuning results are kept for the next start: auto (~/.cache/minserve), "
        "off, or a folder [auto]."
    ),
]
MaxTokens = Annotated[
    int | None, Option(help="Most tokens that one prompt may generate [1000000].")
]
MaxPrompts = Annotated[
    int | None, Option(help="Most prompts, texts or continuations of one request [1024].")
]
MaxBodyBytes = Annotated[int | None, Option(help="Largest request body, in bytes [2**24].")]
StreamInterval = Annotated[
    int | None, Option(help="Tokens per event of a stream, if a request names no number [1].")
]
LoadTimeout = Annotated[float | None, Option(help="Seconds for the model to load [600].")]
RequestTimeout = Annotated[
    float | None,
    Option(
        help="Seconds that a request may take, if it names no timeout; at most "
        "--max-request-timeout [600]."
    ),
]
MaxRequestTimeout = Annotated[
    float | None, Option(help="Most seconds that a request may name as its timeout [3600].")
]
DrainTimeout = Annotated[
    float | None, Option(help="Seconds for requests in flight to finish at shutdown [30].")
]
KeepAliveTimeout = Annotated[
    float | None,
    Option(
        help="Seconds that an idle connection stays open; set it above the idle timeout of a proxy "
        "in front [75]."
    ),
]
Engines = Annotated[
    int | None,
    Option(
        help="Engines behind this server, each on its own GPU; limits of slots, queue and memory "
        "hold for each of them [1]."
    ),
]
ApiWorkers = Annotated[
    int | None, Option(help="API processes that share the port, in front of the engines [1].")
]
EngineRestarts = Annotated[
    int | None,
    Option(
        help="Most restarts of a crashed engine within MINSERVE_RESTART_WINDOW seconds; 0 = never "
        "restart [3]."
    ),
]
HangTimeout = Annotated[
    float | None,
    Option(
        help="Seconds after which an engine or API process that does not answer is killed; 0 = "
        "never [120]."
    ),
]
LogLevel = Annotated[
    str | None,
    Option(help="Least severe messages to log: debug, info, warning, error or critical [info]."),
]

AccessLog = Annotated[
    str | None,
    Option(help="One line per request on stdout, without its texts: json, text or off [off]."),
]
Traces = Annotated[
    str | None,
    Option(
        help="Export OpenTelemetry spans: otlp (configured by the OTEL_* variables) or off [off]."
    ),
]
ApiKeysFile = Annotated[
    Path | None,
    Option(
        help="File of API keys, one per line: name:key, then priority=N if wanted [anybody may "
        "ask]."
    ),
]
AdminKeyFile = Annotated[
    Path | None,
    Option(help="File with the admin key, which opens the /admin endpoints [they are off]."),
]
MetricsAccess = Annotated[
    str | None,
    Option(
        help="Who may read /metrics and /load: open (anybody), key (any API key) or admin [open]."
    ),
]

TlsCertificate = Annotated[
    Path | None,
    Option(help="PEM file with the certificate and its chain; serves HTTPS [plain HTTP]."),
]
TlsKey = Annotated[
    Path | None,
    Option(help="PEM file with the private key, without passphrase [in the certificate's file]."),
]
Playground = Annotated[bool | None, Option(help="Serve the playground page at / [yes].")]
CorsOrigin = Annotated[
    list[str] | None,
    Option(
        help="Origin whose web pages may call the API: https://HOST, https://HOST:PORT or *; "
        "repeatable [none].",
        metavar=TEXT,
    ),
]
SessionHeader = Annotated[
    str | None,
    Option(
        help="Header that is the session_id of requests to /v1/completions and /v1/generate; "
        "without this option x-session-id only chooses the engine [none]."
    ),
]

# cluster
Replicas = Annotated[
    int, Option(help="Replicas at the start, and the least of them with --max-replicas.")
]
MostReplicas = Annotated[
    int | None,
    Option(help="The most replicas; Ray adds and removes some by the load [always --replicas]."),
]
RayAddress = Annotated[
    str | None,
    Option(
        help="Ray cluster to deploy to: HOST:PORT, or auto for the one that this machine belongs "
        "to [a new one on this machine, which ends with this command]."
    ),
]
ReplicaCpus = Annotated[float, Option(help="CPUs that Ray counts for a replica.")]
ReplicaGpus = Annotated[float, Option(help="GPUs of a replica.")]
PythonProxy = Annotated[
    bool,
    Option("--python-proxy", help="Use Ray's own proxy instead of HAProxy; it is slower."),
]

# generate
GeneratedTokens = Annotated[int, Option(help="Most tokens to generate.")]
Temperature = Annotated[
    float, Option(help="Sampling temperature; 0 = greedy: always the most likely token.")
]
OffAtZero = Annotated[float, Option(help="0 = off.")]
OffAtOne = Annotated[float, Option(help="1 = off.")]
TopK = Annotated[int, Option(help="Sample from the K most likely tokens; 0 or -1 = off.")]
TopP = Annotated[
    float,
    Option(
        help="Sample from the most likely tokens whose probabilities add up to P; 1 = off; 0 = "
        "always the most likely token."
    ),
]
Stop = Annotated[
    list[str] | None,
    Option(help="A string that ends the text and is left out of it; repeatable.", metavar=TEXT),
]
IgnoreEos = Annotated[
    bool, Option("--ignore-eos", help="Go on after the model's end-of-text token.")
]
Seed = Annotated[
    int | None,
    Option(help="Seed of the sampling, from -2**63 to 2**63 - 1; default: a new one each time."),
]
Echo = Annotated[bool, Option("--echo", help="Write the prompt first.")]

# score
DocumentLines = Annotated[
    bool,
    Option("--documents", help="A line of the end-of-text text ends a document, as a file does."),
]
DocumentEnd = Annotated[str, Option(help="The line that ends a document with --documents.")]
OnlyDocuments = Annotated[
    Path | None,
    Option(help="Score only documents whose first line is in this file, one a line."),
]
ScoredRange = Annotated[
    str | None,
    Option(
        "--range",
        metavar="BEGIN:END",
        help="Score only these bytes of the data, counted over all files; either end may be left "
        "out.",
    ),
]
SkipHeader = Annotated[
    bool,
    Option(
        "--skip-header",
        help="Read each document's header (lines `Name: value`, an empty line) without counting "
        "its bits and bytes.",
    ),
]
ScoredWindow = Annotated[
    int | None,
    Option(
        help="Score in windows of so many tokens, too, each from the initial state; with "
        "--skip-header each from the state after the document's header, as a server would that "
        "keeps it."
    ),
]
ByPosition = Annotated[
    bool, Option("--by-position", help="Bits per byte by position in the document, too.")
]
PositionPlot = Annotated[
    Path | None, Option(help="Draw bits per byte by position to this PNG file.")
]
Json = Annotated[bool, Option("--json", help="Print the figures as one JSON object.")]

# train
Data = Annotated[
    list[Path] | None,
    Option(
        help="UTF-8 text to train on: a file or a folder; may be given several times. Without "
        "--valid its last tenth is not trained on, and chooses the best weights.",
        metavar=PATH,
    ),
]
Tokens = Annotated[
    Path | None,
    Option(
        help="Folder of the token cache: the data is encoded into it once. With a cache that is "
        "there, --data can be left out [in --out, until the run is finished]."
    ),
]
Valid = Annotated[
    str | None,
    Option(
        help="What chooses the best weights instead: BEGIN:END (bytes of the data), @FILE (first "
        "lines of documents, one a line) or a path of other text."
    ),
]
Test = Annotated[
    str | None, Option(help="What is measured once, at the end; given like --valid [none].")
]
HeaderEvery = Annotated[
    int,
    Option(
        help="Repeat a document's header (lines `Name: value` and an empty line at its beginning) "
        "before stretches of about so many characters of the training part; 0 = never."
    ),
]
VocabSize = Annotated[
    int | None,
    Option(help="Train a byte-level BPE tokenizer with so many tokens on the data [no]."),
]
EncodeOnly = Annotated[
    bool, Option("--encode-only", help="Only write the token cache in --tokens.")
]
Gpus = Annotated[int, Option(help="Train on so many GPUs of this machine.")]
Carry = Annotated[
    float,
    Option(
        help="Probability that a window continues where the last one of its row ended, with its "
        "state; 0 = every window begins at the initial state."
    ),
]
EvaluateTokens = Annotated[
    int, Option(help="Tokens of the validation part to evaluate on while training; 0 = all.")
]
CardText = Annotated[
    Path | None,
    Option("--card", help="Markdown to put into the model card: data, licences, limits [none]."),
]
DataName = Annotated[str | None, Option(help="Name of the data in the model card [its path].")]
Out = Annotated[
    Path | None,
    Option(help="Folder for the checkpoint, and for the run's state until it is finished."),
]
Cell = Annotated[CellName, Option(help="The recurrent cell.")]
Layers = Annotated[int, Option(help="Number of layers.")]
Width = Annotated[int, Option(help="Width of the model.")]
Expansion = Annotated[
    float, Option(help="Inner width of the recurrence, as a multiple of d-model.")
]
ConvKernel = Annotated[
    int, Option(help="Taps of the causal convolution before the cell; 0 = no convolution.")
]
MlpRatio = Annotated[float, Option(help="MLP width as a multiple of d-model; 0 = no MLP.")]
TieEmbeddings = Annotated[
    bool, Option("--tie-embeddings", help="Use the embedding's weights for the head too.")
]
LearnedInitialState = Annotated[
    bool, Option("--learned-initial-state", help="Train the initial state h_0; else it is 0.")
]
Steps = Annotated[int, Option(help="Steps of the whole run.")]
Batch = Annotated[int, Option(help="Windows per step.")]
Window = Annotated[int, Option(help="Tokens per window.")]
LearningRate = Annotated[float, Option(help="Learning rate after the warm-up.")]
Warmup = Annotated[int, Option(help="Steps in which the learning rate rises from 0.")]
FinalLearningRate = Annotated[float, Option(help="Learning rate at the end of the cosine.")]
Beta = Annotated[float, Option(help="Parameter of AdamW.")]
WeightDecay = Annotated[float, Option(help="Weight decay of the matrices.")]
Dropout = Annotated[float, Option(help="Share of activations that are dropped; 0 = off.")]
TrainingSeed = Annotated[int, Option(help="Seed of the weights, the windows and the sample.")]
Clip = Annotated[float, Option(help="Largest norm of the gradient; 0 = no clipping.")]
Ema = Annotated[
    float,
    Option(help="Decay of an average of the weights, which is then what is kept; 0 = off."),
]
EverySteps = Annotated[int, Option(help="Interval in steps.")]
WrittenDtype = Annotated[DtypeName, Option(help="Data type of the written weights.")]
TrainingTokenizer = Annotated[
    Path | None, Option(help="A tokenizer.json; without one, every byte is a token.")
]
EndOfText = Annotated[
    str,
    Option(
        help="The end-of-text token, read behind each document if the tokenizer has it; a line of "
        "this text ends a document."
    ),
]
SamplePrompt = Annotated[
    str, Option(help="Prompt of the sample text in the checkpoint's README [a newline].")
]
Compile = Annotated[bool, Option("--compile", help="Use torch.compile.")]
Resume = Annotated[bool, Option("--resume", help="Continue the run in --out.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace the run in --out.")]

# convert
ConvertedFamily = Annotated[
    str | None,
    Option(
        help="Family of a state dict's model, such as gru [the one that its tensors' names show].",
        metavar="NAME",
    ),
]
NormalizeGates = Annotated[
    bool | None,
    Option(help="Whether a minLSTM normalises its gates; the weights do not tell."),
]
Tanh = Annotated[
    bool | None, Option(help="Whether an SRU's output is of tanh(c); the weights do not tell [no].")
]
SkipTerm = Annotated[
    bool | None,
    Option(
        help="Whether an SRU has a highway (has_skip_term); the weights tell only where a layer's "
        "input has another width [yes]."
    ),
]
NormalizeAfter = Annotated[
    bool | None,
    Option(
        help="Whether an SRU's layer norms are behind its layers; the weights tell only where a "
        "layer's input has another width [no]."
    ),
]
NormEps = Annotated[float | None, Option(help="Epsilon of the norms [that of the source project].")]
ConvertedTokenizer = Annotated[
    Path | None,
    Option(
        help="Tokenizer for the folder: a tokenizer.json, a SentencePiece .model, or a vocabulary "
        "(one word a line, or JSON)."
    ),
]
EosTokenId = Annotated[
    list[int] | None,
    Option(help="Token id that ends a text; repeatable [as the source says].", metavar=NUMBER),
]
ConvertedDtype = Annotated[
    DtypeName | None, Option(help="Data type of the written weights [as they are].")
]
ConvertedQuantize = Annotated[
    Quantization | None, Option(help="Write weights quantised to 8 bits [no].")
]

# inspect
InspectedSlots = Annotated[
    int | None,
    Option("--max-slots", help="Sequences that run at once [256, or as many as fit in memory]."),
]
InspectedShareSlots = Annotated[
    int | None,
    Option(
        "--share-slots",
        help="Cached and kept states in device memory [64, or as many as fit in memory].",
    ),
]


def describe(error: Mapping[str, Any], options: Container[str]) -> str:
    """Return a message for one of pydantic's error details about a setting.

    It names the setting as its environment variable, and as an option if it is one of `options`.
    """
    name = str(error["loc"][0])
    where = f"MINSERVE_{name.upper()}"
    if name in options:
        where = f"--{name.replace('_', '-')} ({where})"
    return f"{where} is {error['input']!r}: {error['msg']}"
