"""Published folders: every format, type and head is read; what does not fit is named."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from torch import Tensor, nn

from engine.errors import CheckpointError, ConfigError
from engine.models.convert import convert
from engine.models.loader import fingerprint, load_config, load_model, resolve
from engine.models.minrnn.lm import LM
from tests.models.published import (
    DEPTH,
    EPS,
    FORMATS,
    VOCAB,
    WIDTH,
    Weights,
    min_lm,
    published_weights,
    write_bin,
    write_config,
    write_folder,
    write_single,
)
from tests.models.variants import int32

AGREES = 1e-4  # of the logits' deviation


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "model")
    return tmp_path / "model"


def read(model: LM, tokens: Tensor) -> Tensor:
    state = model.new_state(1)
    hidden = model.prefill(tokens, int32([0, len(tokens)]), state, int32([0]))
    return model.logits(hidden).detach().double()


def stepped(model: LM, tokens: Tensor) -> Tensor:
    state, slots = model.new_state(1), int32([0])
    return torch.cat(
        [model.logits(model.step(token, state, slots)).detach() for token in tokens.split(1)]
    ).double()


@pytest.mark.parametrize("options", [
    {}, {"expansion": 1.0}, {"enable_conv": True, "conv_kernel_size": 4}, {"use_lstm": True},
    {"ff_mult": 3, "expansion": 2.0},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("prefix", ["model.", "model.min_gru_model.", ""])
def test_the_hub_s_mingru_computes_what_its_package_does(
    options: dict[str, Any], prefix: str, tmp_path: Path
) -> None:
    theirs = min_lm(**options)
    write_config(tmp_path)
    weights = published_weights(theirs, prefix)
    # Its class ties a head of its own to the embedding and does not use it.
    write_single(tmp_path, {**weights, "lm_head.weight": torch.randn(VOCAB, WIDTH)})
    ours, config = load_model(tmp_path, "cpu")
    assert (config.family, config.norm_eps, config.eos_token_ids) == ("minrnn", EPS, (3,))
    assert config.cell == ("minlstm" if options.get("use_lstm") else "mingru")
    theirs = theirs.double()
    for length in (1, 2, 37, 300):
        tokens = torch.randint(VOCAB, (length,))
        with torch.no_grad():
            expected = theirs(tokens.unsqueeze(0))[0]
        allowed = AGREES * float(expected.std())
        got = read(ours, tokens)
        assert (got - expected).abs().max() < allowed
        assert (stepped(ours, tokens) - got).abs().max() < allowed


def test_norms_of_earlier_versions_multiply_by_gamma_plus_one(tmp_path: Path) -> None:
    weights = published_weights(min_lm())
    renamed = {
        name.replace(".weight", ".gamma") if tensor.dim() == 1 and "norm" in name else name: tensor
        for name, tensor in weights.items()
    } | {f"model.layers.{i}.{j}.gamma": torch.randn(WIDTH) for i in range(DEPTH) for j in (1, 3)}
    for i in range(DEPTH):
        for j in (1, 3):
            del renamed[f"model.layers.{i}.{j}.weight"]
    write_config(tmp_path)
    write_single(tmp_path, renamed)
    model, config = load_model(tmp_path, "cpu")
    assert config.norm_eps == 1e-12
    state = model.state_dict()
    assert torch.equal(state["norm.weight"], renamed["model.norm.gamma"] + 1)
    assert torch.equal(state["layers.1.mlp.norm.weight"], renamed["model.layers.1.3.gamma"] + 1)


@pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)
def test_every_format_of_files(
    write: Callable[[Path, Weights], None], folder: Path, tmp_path: Path
) -> None:
    expected = load_model(folder, "cpu")[0].state_dict()
    other = tmp_path / "other"
    other.mkdir()
    write_config(other)
    write(other, published_weights(min_lm()))
    model, _ = load_model(other, "cpu")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in expected.items())
    # every file that is read decides which states belong to the model
    prints = {fingerprint(other)}
    for path in sorted(other.iterdir()):
        if path.name.endswith("index.json"):
            continue
        content = path.read_bytes()
        path.write_bytes(content + b" ")
        prints.add(fingerprint(other))
        path.write_bytes(content)
    files = [path for path in other.iterdir() if not path.name.endswith("index.json")]
    assert len(prints) == len(files) + 1


def test_safetensors_come_before_other_files(folder: Path) -> None:
    before = fingerprint(folder)
    write_bin(folder, {"x": torch.ones(1)})
    (folder / "a.pth").write_bytes(b"")
    load_model(folder, "cpu")
    assert fingerprint(folder) == before


def test_a_loaded_model_outlives_its_file(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_bin(tmp_path, published_weights(min_lm()))
    model, _ = load_model(tmp_path, "cpu")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("stored", "said", "held"),
    [
        ([torch.float32], None, torch.float32),
        ([torch.bfloat16], None, torch.bfloat16),
        ([torch.float16], None, torch.float16),
        ([torch.float64], None, torch.float32),
        ([torch.bfloat16, torch.bfloat16, torch.float32], None, torch.bfloat16),
        ([torch.float32], {"torch_dtype": "bfloat16"}, torch.bfloat16),
        ([torch.bfloat16], {"dtype": "float16"}, torch.float16),
        ([torch.bfloat16], {"dtype": "torch.float64", "torch_dtype": "float16"}, torch.float32),
        ([torch.float16], {"torch_dtype": None, "dtype": "auto"}, torch.float16),
    ],
)
def test_every_type_of_weights(
    stored: list[torch.dtype], said: dict[str, Any] | None, held: torch.dtype, tmp_path: Path
) -> None:
    weights = published_weights(min_lm())
    mixed = {
        name: tensor.to(stored[i % len(stored)]) for i, (name, tensor) in enumerate(weights.items())
    }
    write_config(tmp_path, **(said or {}))
    write_single(tmp_path, mixed)
    model, config = load_model(tmp_path, "cpu")
    assert {weight.dtype for weight in model.parameters()} == {held}
    assert config.dtype == str(held).removeprefix("torch.")
    name = "model.token_emb.weight"
    assert torch.equal(model.state_dict()["embedding.weight"], mixed[name].to(held))
    asked, _ = load_model(tmp_path, "cpu", "float16")
    assert {weight.dtype for weight in asked.parameters()} == {torch.float16}


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_at_load_and_by_convert(kind: Any, folder: Path, tmp_path: Path) -> None:
    model, config = load_model(folder, "cpu", quantize=kind)
    assert config.quantization == kind
    convert(folder, tmp_path / "own", quantize=kind)
    own, _ = load_model(tmp_path / "own", "cpu")
    expected = model.state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in own.state_dict().items())


@pytest.mark.parametrize("options", [
    {"quantize": "int8"}, {"quantize": "fp8"}, {"quantize": "int8", "dtype": "float32"},
    {"dtype": "float32"}, {"dtype": "float16"}, {},
], ids=str)  # fmt: skip
def test_convert_rounds_the_stored_values_once(options: dict[str, Any], tmp_path: Path) -> None:
    """They may have more digits than the type that config.json names."""
    source = tmp_path / "model"
    source.mkdir()
    write_config(source, torch_dtype="bfloat16")
    write_single(source, published_weights(min_lm()))
    config = convert(source, tmp_path / "own", **options)
    assert config.dtype == options.get("dtype", "bfloat16")
    expected = load_model(source, "cpu", **options)[0].state_dict()
    own = load_model(tmp_path / "own", "cpu")[0].state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in own.items())


def test_a_tied_head(tmp_path: Path) -> None:
    weights = published_weights(min_lm())
    del weights["model.to_logits.weight"]
    write_config(tmp_path, tie_word_embeddings=True)
    write_single(tmp_path, weights)
    model, config = load_model(tmp_path, "cpu")
    assert config.tie_embeddings and model.head is None
    assert torch.equal(model.state_dict()["embedding.weight"], weights["model.token_emb.weight"])


def test_a_stored_head_is_not_tied(tmp_path: Path) -> None:
    """Its class ties lm_head, and returns the logits of the wrapped model."""
    weights = published_weights(min_lm())
    write_config(tmp_path, tie_word_embeddings=True)
    write_single(tmp_path, {**weights, "lm_head.weight": weights["model.token_emb.weight"].clone()})
    model, config = load_model(tmp_path, "cpu")
    assert not config.tie_embeddings
    assert torch.equal(model.state_dict()["head.weight"], weights["model.to_logits.weight"])


def _edited(edit: Callable[[Weights], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        weights = published_weights(min_lm())
        edit(weights)
        write_single(folder, weights)

    return spoil


def _surplus(weights: Weights) -> None:
    weights |= {f"extra.{i}": torch.ones(1) for i in range(5)}


def _configured(**values: Any) -> Callable[[Path], None]:
    return lambda folder: write_config(folder, **values)


class Wrapped(nn.Module):
    """A pickled module, as some scripts save it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


class Bomb:
    """A pickle of it creates a file when it is loaded without weights_only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def _only(write: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        write(folder)

    return spoil


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (
        _edited(lambda w: w.pop("model.layers.1.3.weight")),
        r"tensor 'layers\.1\.3\.weight' is missing",
    ),
    "no-head": (
        _edited(lambda w: w.pop("model.to_logits.weight")),
        r"tensor 'to_logits\.weight' is missing",
    ),
    "surplus": (_edited(_surplus), r"tensor 'extra\.0' \[1\], .*\(and 2 more\)"),
    "shape": (
        _edited(lambda w: w.update({"model.norm.weight": torch.ones(5)})),
        r"'norm\.weight' has shape \[5\], .* \[24\]",
    ),
    "type": (
        _edited(lambda w: w.update({"model.norm.weight": torch.ones(WIDTH).int()})),
        r"'model\.norm\.weight' is stored as I32",
    ),
    "sizes": (_configured(dim=25), "config.json says dim 25, the weights 24"),
    "depth": (_configured(n_layer=3), "config.json says n_layer 3, the weights 2"),
    "huge": (_configured(dim=10**400), r"config\.json: dim is 1000.*allowed: an integer from 1"),
    "no-number": (_configured(depth="2"), r"config\.json: depth is '2'; allowed: an integer"),
    "tied": (_configured(tie_word_embeddings="no"), "tie_word_embeddings is 'no'; allowed: true"),
    "index": (
        _edited(lambda w: w.update({f"model.layers.{'9' * 5000}.x": torch.ones(1)})),
        "is not part of a known layout",
    ),
    "index-of-a-part": (
        _edited(lambda w: w.update({f"model.layers.0.4.{'9' * 5000}.weight": torch.ones(1)})),
        "instead of two",
    ),
    "no-width": (_configured(dim=...), "d_model .*is missing"),
    "dtype": (_configured(torch_dtype="int4"), "torch_dtype is 'int4'; allowed: float64"),
    "eos": (_configured(eos_token_id=37), "eos_token_id is 37; allowed"),
    "architecture": (
        _configured(architectures=["LlamaForCausalLM"]),
        r"LlamaForCausalLM.*does not serve; allowed: .*MinGRULMForCausalLM",
    ),
    "not-causal": (
        _configured(architectures=["MinGRUForCausalLM"]),
        "MinGRUForCausalLM.*not served: it normalises over batch and time.*not causal",
    ),
    "no-names": (_configured(architectures=[[1], None]), "does not serve"),
    "nothing": (_only(lambda folder: None), r"model\.safetensors is missing, and so are"),
    "two-files": (
        _only(lambda f: [(f / name).write_bytes(b"") for name in ("a.pth", "b.pt")]),
        r"several other files may hold the weights \(a\.pth, b\.pt\)",
    ),
    "garbage": (
        _only(lambda folder: (folder / "w.pth").write_bytes(b"\x80\x02garbage")),
        r"w\.pth: damaged, or neither",
    ),
    "no-state-dict": (
        _only(lambda folder: torch.save([1], folder / "w.pth")),
        r"w\.pth: contains no state dict",
    ),
    **{
        kind: (
            _only(
                lambda f, value=value: write_bin(
                    f, {**published_weights(min_lm()), "model.norm.weight": value}
                )
            ),
            rf"pytorch_model\.bin: tensor 'model\.norm\.weight' {says}; allowed: dense tensors",
        )
        for kind, value, says in (
            ("meta", torch.empty(WIDTH, device="meta"), r"has no values \(device meta\)"),
            ("nested", torch.nested.nested_tensor([torch.ones(2)]), "is nested"),
            ("sparse", torch.ones(WIDTH).to_sparse(), "is sparse_coo"),
            (
                "repeated",
                torch.ones(1).expand(2**40),
                r"of shape \[1099511627776\] repeats 4 bytes",
            ),
        )
    },
    "module": (
        _only(lambda folder: torch.save(Wrapped(), folder / "w.pth")),
        r"w\.pth: contains Python objects .*never unpickled.*torch\.save\(torch\.load\('w\.pth'",
    ),
    "shard-gone": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"x": "gone.safetensors"}})
        ),
        "gone.safetensors is missing",
    ),
    "shard-with-a-null": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"x": "a\0b"}})
        ),
        r"'a\\x00b' is not the name of a file beside it",
    ),
    "shard-of-no-text": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"x": "\ud800"}})
        ),
        r"'\\ud800' is not the name of a file beside it",
    ),
    "shard-elsewhere": (
        _only(
            lambda folder: (folder / "pytorch_model.bin.index.json").write_text(
                json.dumps({"weight_map": {"x": "../x.bin"}})
            )
        ),
        r"'\.\./x\.bin' is not the name of a file beside it",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_named(
    spoil: Callable[[Path], object], message: str, folder: Path
) -> None:
    spoil(folder)
    with pytest.raises((CheckpointError, ConfigError), match=message) as error:
        load_model(folder, "cpu")
    assert str(folder) in error.value.message
    assert "\n" not in error.value.message


def test_nothing_in_a_folder_is_run(folder: Path) -> None:
    exploded = folder / "exploded"
    (folder / "modeling.py").write_text(f"open({str(exploded)!r}, 'w')")
    load_model(folder, "cpu")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(exploded), protocol=2))
    with pytest.raises(CheckpointError):
        load_model(folder, "cpu")
    torch.save({**published_weights(min_lm()), "x": Bomb(exploded)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="never unpickled"):
        load_model(folder, "cpu")
    assert not exploded.exists()


def test_plain_values_among_the_weights_are_passed_over(folder: Path) -> None:
    """The hub's MinGRULM stores its configuration in its state dict."""
    expected = load_model(folder, "cpu")[0].state_dict()
    (folder / "model.safetensors").unlink()
    write_bin(folder, {**published_weights(min_lm()), "config": {"d_model": WIDTH}})
    model, _ = load_model(folder, "cpu")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 3, "pad_token_id": 0, "bos_token_id": 1}, None, (3,)),
        ({"eos_token_id": [4, 5]}, None, (4, 5)),
        ({"eos_token_id": None}, None, ()),
        ({"eos_token_id": ...}, None, ()),
        ({"eos_token_id": 3}, {"eos_token_id": [6, 3], "pad_token_id": 9}, (6, 3)),
        ({"eos_token_id": 3}, {"bos_token_id": 1}, (3,)),
    ],
)
def test_end_of_text_ids(
    config: dict[str, Any], generation: dict[str, Any] | None, ids: tuple[int, ...], folder: Path
) -> None:
    write_config(folder, **config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert load_config(folder).eos_token_ids == ids


def test_convert_writes_minserve_s_form(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    (folder / "tokenizer_config.json").write_text("{}")
    config = convert(folder, tmp_path / "own", dtype="bfloat16")
    written = json.loads((tmp_path / "own" / "config.json").read_text())
    assert written["model_type"] == "minserve" and "architectures" not in written
    assert config.eos_token_ids == (5, 6) == load_config(tmp_path / "own").eos_token_ids
    own, _ = load_model(tmp_path / "own", "cpu")
    expected, _ = load_model(folder, "cpu", "bfloat16")
    assert all(
        torch.equal(own.state_dict()[name], tensor)
        for name, tensor in expected.state_dict().items()
    )
    assert (tmp_path / "own" / "tokenizer_config.json").exists()


class TestHub:
    """Which files of a repo are fetched."""

    @staticmethod
    def fetched(repo: dict[str, bytes], target: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
        target.mkdir()

        def download(name: str, **patterns: Any) -> str:
            for file in huggingface_hub.utils.filter_repo_objects(repo, **patterns):
                (target / file).parent.mkdir(exist_ok=True)
                (target / file).write_bytes(repo[file])
            return str(target)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert resolve("owner/model") == target
        return {path.name for path in target.iterdir()}

    def test_safetensors_alone_where_there_are_both(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_bin(folder, published_weights(min_lm()))
        for name in ("modeling.py", "optimizer.pt", "tokenizer.model", "added_tokens.json"):
            (folder / name).write_bytes(b"x")
        repo = {path.name: path.read_bytes() for path in folder.iterdir()}
        kept = {"config.json", "model.safetensors", "tokenizer.model", "added_tokens.json"}
        assert self.fetched(repo, tmp_path / "hub", monkeypatch) == kept

    @pytest.mark.parametrize("kind", ["bin", "sharded_bin", "pth", "nested_pt"])
    def test_other_weights_where_there_are_none(
        self, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = tmp_path / "source"
        source.mkdir()
        write_config(source)
        FORMATS[kind](source, published_weights(min_lm()))
        (source / "modeling.py").write_bytes(b"x")
        repo = {path.name: path.read_bytes() for path in source.iterdir()}
        # a training script's, and other forms of the weights
        for name in ("step-9/optimizer.pt", "step-9/model.safetensors", "onnx/config.json"):
            repo[name] = b"x"
        names = self.fetched(repo, tmp_path / "hub", monkeypatch)
        assert names == {name for name in repo if "/" not in name} - {"modeling.py"}
        load_model(tmp_path / "hub", "cpu")
