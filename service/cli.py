"""The command line: `minserve serve | cluster | generate | score | train | convert | ...`.

This module may import every package. Each command imports what it needs in its function, so that
`--help` is fast and does not load torch. Every expected error ends as one line on stderr and exit
code 2.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError
from engine.training.recipe import OptimizerName, Precision, Recipe, Schedule
from service.terminal import console as terminal
from service.terminal import options as options
from service.terminal import text as terminal_text
from service.terminal.cluster import cluster
from service.terminal.serve import serve
from service.text.documents import read_text

app = typer.Typer(
    help="Serve, train and convert recurrent language models.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _without_command(context: typer.Context, version: options.Version = False) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command()(serve)
app.command()(cluster)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help='The text to continue; "-" reads stdin.')],
    model: options.Model = EngineConfig.model,
    max_tokens: options.GeneratedTokens = 200,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.OffAtZero = 0.0,
    repetition_penalty: options.OffAtOne = 1.0,
    presence_penalty: options.OffAtZero = 0.0,
    frequency_penalty: options.OffAtZero = 0.0,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    seed: options.Seed = None,
    echo: options.Echo = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantize: options.Quantize = EngineConfig.quantize,
    state_dtype: options.StateDtype = EngineConfig.state_dtype,
    deterministic: options.Deterministic = False,
    threads: options.Threads = None,
) -> None:
    """Continue a prompt and print the text as it is generated. Needs no server."""
    from engine.client.client import EngineClient
    from engine.engine import Engine
    from engine.inline import InlineTransport
    from engine.models.loader import load_config, resolve
    from engine.protocol.sampling_params import SamplingParams
    from service.terminal.generate import generate_text, seed_of, top_k_of

    text = "".join(terminal_text.text_pieces(Path("-"))) if prompt == "-" else prompt
    if not all(stop or []):
        raise ConfigError("--stop is ''; allowed: a text of at least one character", param="stop")
    asked = EngineConfig(
        device=device,
        dtype=dtype,
        quantize=quantize,
        state_dtype=state_dtype,
        deterministic=deterministic,
        threads=threads,
    )
    config = replace(asked, model=model, max_slots=1, share_slots=0, host_state_bytes=0)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k_of(top_k),
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        ignore_eos=ignore_eos,
        seed=seed_of(seed),
    )
    folder = resolve(model)
    encoder = terminal_text.load_tokenizer(folder, load_config(folder).vocab_size)
    client = EngineClient(InlineTransport(Engine.load(config)))
    if echo:
        terminal.write(text)
    try:
        asyncio.run(generate_text(client, encoder, text, sampling, stop or [], terminal.write))
    except KeyboardInterrupt:
        terminal.write("\n")
        raise
    terminal.write("\n")


# the second path and those after it are extra arguments: typer's help would call a list list[Path]
@app.command(context_settings={"allow_extra_args": True})
def score(
    context: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(
            help='Files and folders of UTF-8 text of any length, each file a document; "-" alone '
            "reads stdin.",
            metavar="PATH...",
        ),
    ],
    model: options.Model = EngineConfig.model,
    documents: options.DocumentLines = False,
    end_of_text: options.DocumentEnd = "<|endoftext|>",
    only: options.OnlyDocuments = None,
    byte_range: options.ScoredRange = None,
    skip_header: options.SkipHeader = False,
    window: options.ScoredWindow = None,
    by_position: options.ByPosition = False,
    plot: options.PositionPlot = None,
    as_json: options.Json = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantize: options.Quantize = EngineConfig.quantize,
    state_dtype: options.StateDtype = EngineConfig.state_dtype,
    deterministic: options.Deterministic = False,
    threads: options.Threads = None,
) -> None:
    """Measure how well a model predicts texts of any length: perplexity and bits per byte.

    Each document is scored from the initial state, with the state carried to its end.
    """
    from service.terminal import score as scoring

    wanted = scoring.Wanted(
        paths=[path, *map(Path, context.args)],
        separator=end_of_text if documents else None,
        only=only,
        within=scoring.range_of(byte_range),
        skip_header=skip_header,
        window=window,
        by_position=by_position,
        plot=plot,
    )
    report = scoring.score(
        wanted,
        EngineConfig(
            model=model,
            device=device,
            dtype=dtype,
            quantize=quantize,
            state_dtype=state_dtype,
            deterministic=deterministic,
            threads=threads,
        ),
    )
    print(json.dumps(report) if as_json else scoring.shown(report))


@app.command()
def train(
    data: options.Data = None,
    out: options.Out = None,
    tokens: options.Tokens = None,
    valid: options.Valid = None,
    test: options.Test = None,
    header_every: options.HeaderEvery = 0,
    tokenizer: options.TrainingTokenizer = None,
    vocab_size: options.VocabSize = None,
    end_of_text: options.EndOfText = "<|endoftext|>",
    encode_only: options.EncodeOnly = False,
    cell: options.Cell = "mingru",
    layers: options.Layers = 3,
    d_model: options.Width = 384,
    expansion: options.Expansion = 2.0,
    conv_kernel: options.ConvKernel = 4,
    mlp_ratio: options.MlpRatio = 4.0,
    tie_embeddings: options.TieEmbeddings = False,
    learned_initial_state: options.LearnedInitialState = False,
    steps: options.Steps = Recipe.steps,
    batch: options.Batch = Recipe.batch,
    window: options.Window = Recipe.window,
    carry: options.Carry = Recipe.carry,
    optimizer: Annotated[
        OptimizerName,
        typer.Option(help="muon: Muon for the layers' matrices and AdamW for the rest."),
    ] = Recipe.optimizer,
    learning_rate: options.LearningRate = Recipe.learning_rate,
    schedule: Annotated[
        Schedule, typer.Option(help="How the learning rate changes after the warm-up.")
    ] = Recipe.schedule,
    warmup: options.Warmup = Recipe.warmup,
    final_learning_rate: options.FinalLearningRate = Recipe.final_learning_rate,
    beta1: options.Beta = Recipe.beta1,
    beta2: options.Beta = Recipe.beta2,
    weight_decay: options.WeightDecay = Recipe.weight_decay,
    clip: options.Clip = Recipe.clip,
    dropout: options.Dropout = Recipe.dropout,
    ema: options.Ema = Recipe.ema,
    evaluate_every: options.EverySteps = Recipe.evaluate_every,
    evaluate_tokens: options.EvaluateTokens = Recipe.evaluate_tokens,
    save_every: options.EverySteps = Recipe.save_every,
    seed: options.TrainingSeed = Recipe.seed,
    precision: Annotated[
        Precision, typer.Option(help="Precision of matrix products on a GPU.")
    ] = Recipe.precision,
    dtype: options.WrittenDtype = Recipe.dtype,
    sample_prompt: options.SamplePrompt = "\n",
    card: options.CardText = None,
    data_name: options.DataName = None,
    device: options.Device = "auto",
    gpus: options.Gpus = 1,
    threads: options.Threads = None,
    compile: options.Compile = False,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Train a model on texts and write a folder that `minserve serve --model` loads.

    The defaults are the paper's recipe for tinyshakespeare. Ctrl-C saves the run; the same
    command with --resume continues it.
    """
    given = dict(locals())
    from engine.models.minrnn.config import MinRnnConfig
    from engine.training import token_cache
    from engine.training.ranks import Ranks
    from service.terminal import corpus as texts
    from service.terminal import train as run

    if not data and tokens is None:
        raise ConfigError("--data is missing: the text to train on, or --tokens with a cache")
    if out is None and not encode_only:
        raise ConfigError("--out is missing: the folder for the checkpoint")
    cache = tokens or (None if out is None else out / run.TOKENS_FOLDER)
    if cache is None:
        raise ConfigError("--encode-only needs --tokens, the folder to write")
    corpus = None
    if data:
        corpus = texts.Corpus(
            paths=data,
            valid=valid,
            test=test,
            end_of_text=end_of_text,
            header_every=header_every,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
        )
    if encode_only:
        parts = token_cache.read(cache) if corpus is None else texts.prepare(corpus, cache)
        for name, part in parts.items():
            print(f"{name}: {len(part):,} tokens of {part.bytes:,} bytes, {part.what}")
        return

    assert out is not None
    started = Ranks.local_rank() is not None  # one process of several
    recipe = Recipe(**{field.name: given[field.name] for field in fields(Recipe)})
    shape = MinRnnConfig(
        cell=cell,
        vocab_size=1,  # until there is a tokenizer
        d_model=d_model,
        n_layers=layers,
        expansion=expansion,
        conv_kernel=conv_kernel,
        mlp_ratio=mlp_ratio,
        tie_embeddings=tie_embeddings,
        learned_initial_state=learned_initial_state,
        dtype=dtype,
    )
    if not sample_prompt:
        raise ConfigError("--sample-prompt is empty; allowed: at least one token")
    about = "" if card is None else read_text(card)
    if resume:
        run.check_can_resume(out)
    elif not overwrite and Ranks.starts_first():
        run.check_folder(out)
    if gpus != 1 and not started:
        from service.terminal.launch import run_on_gpus

        run.check_gpus(gpus, device, batch)
        if corpus is not None:
            texts.prepare(corpus, cache)
        raise typer.Exit(run_on_gpus(gpus))

    import torch

    from engine.device import resolve_device, usable_cpus
    from engine.training.folder import Card
    from engine.training.trainer import Trainer

    place = resolve_device(EngineConfig(device=run.own_device(device)).device)
    share = max(1, usable_cpus() // Ranks.local_count())
    torch.set_num_threads(EngineConfig(threads=threads).threads or share)
    ranks = Ranks.join(place)
    with ranks.one_failure():
        if ranks.first and corpus is not None:
            texts.prepare(corpus, cache)
        ranks.of_first(None)  # the others wait for the cache
        try:
            parts = token_cache.read(cache)
            encoder = terminal_text.read_tokenizer(cache / token_cache.TOKENIZER)
            prompt = torch.tensor(encoder.encode(sample_prompt, add_special_tokens=False).ids)
            if prompt.numel() == 0:
                raise ConfigError("--sample-prompt has no token in this tokenizer")
            trainer = Trainer(
                replace(
                    shape,
                    vocab_size=encoder.get_vocab_size(),
                    eos_token_id=encoder.token_to_id(end_of_text),
                ),
                recipe,
                run.data_of(parts, window, encoder),
                out,
                place,
                compile_model=compile,
                ranks=ranks,
            )
            run.begin(trainer, out, encoder, resume=resume)
        except ConfigError:
            if ranks.first and tokens is None and not resume:
                run.discard(cache, out)
            raise
        if ranks.first:
            sizes = ", ".join(f"{name} {len(part):,}" for name, part in trainer.data.parts.items())
            terminal.note(
                f"{cell}, {trainer.parameters:,} weights; tokens: {sizes}; {trainer.device_name}"
                + (f" x {ranks.count}" if ranks.count > 1 else "")
            )
        finished = run.follow(trainer, steps)
    ranks.leave()
    if not finished:
        raise typer.Exit(130)
    if ranks.first:
        shown = Card(
            data=data_name or ", ".join(path.name for path in data or [cache]),
            command=terminal.command_for_others(),
            prompt=sample_prompt,
            sample="",
            about=about,
        )
        told = run.write_results(trainer, encoder, shown, prompt.to(place), seed=seed)
        if tokens is None:
            run.discard(cache, out)
        print(f"{out}: {told}")


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="A model folder as it is published, or a file with a state dict: .safetensors or "
            "torch.save."
        ),
    ],
    destination: Annotated[Path, typer.Argument(help="The checkpoint folder to write.")],
    family: options.ConvertedFamily = None,
    normalize_gates: options.NormalizeGates = None,
    norm_eps: options.NormEps = None,
    tanh: options.Tanh = None,
    skip_term: options.SkipTerm = None,
    normalize_after: options.NormalizeAfter = None,
    tokenizer: options.ConvertedTokenizer = None,
    eos_token_id: options.EosTokenId = None,
    dtype: options.ConvertedDtype = None,
    quantize: options.ConvertedQuantize = None,
) -> None:
    """Convert another project's folder or weights to a model folder in minserve's form."""
    import shutil

    from engine.models.convert import convert as run
    from service.text.tokenizer import Tokenizer

    if tokenizer is not None:
        terminal_text.check_tokenizer(tokenizer)  # refused before anything is written
    config = run(
        source,
        destination,
        family=family,
        dtype=dtype,
        normalize_gates=normalize_gates,
        norm_eps=norm_eps,
        tanh=tanh,
        skip_term=skip_term,
        normalize_after=normalize_after,
        eos_token_id=eos_token_id or None,
        quantize=quantize,
        tokenizer=tokenizer,
    )
    try:
        if Tokenizer.load(destination, config.vocab_size) is None:
            terminal.note("the folder has no tokenizer, so it serves token ids only")
    except EngineError:
        shutil.rmtree(destination)
        raise
    kind = f", {config.quantization} weights" if config.quantization else ""
    print(f"{destination}: {config.cell}, {config.n_layers} layers of width {config.d_model}{kind}")


@app.command()
def inspect(
    model: Annotated[
        str, typer.Argument(help="A bundled name, a folder or a Hugging Face repo id.")
    ],
    as_json: options.Json = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantize: options.Quantize = EngineConfig.quantize,
    state_dtype: options.StateDtype = EngineConfig.state_dtype,
    max_slots: options.InspectedSlots = EngineConfig.max_slots,
    share_slots: options.InspectedShareSlots = EngineConfig.share_slots,
) -> None:
    """Say what a model folder holds, how it would run here and what it needs in memory."""
    from service.terminal.inspect import inspect_model, shown

    report = inspect_model(
        EngineConfig(
            model=model,
            device=device,
            dtype=dtype,
            quantize=quantize,
            state_dtype=state_dtype,
            max_slots=max_slots,
            share_slots=share_slots,
        )
    )
    print(json.dumps(report) if as_json else shown(report))


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Load-test a running server; `minserve bench --help` lists the options."""
    from service.terminal.bench.command import main as run

    raise typer.Exit(run(context.args))


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        code: Any = app(args=arguments, prog_name="minserve", standalone_mode=False)
    except typer.TyperException as usage:
        terminal.error(usage.format_message())
    except (EngineError, terminal_text.TextError, ImportError) as problem:
        # ImportError: the compiled operators are missing
        terminal.error(str(problem))
    except OSError as problem:
        where = f"{problem.filename}: " if problem.filename else ""
        terminal.error(f"{where}{problem.strerror or problem}")
    else:
        return code if isinstance(code, int) else 0
    return 2


if __name__ == "__main__":
    sys.exit(main())
