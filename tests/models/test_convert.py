"""Converting, whatever the layout: how files are read, what is refused, what is left behind."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from minGRU_pytorch.minLM import minLM
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor

from engine.errors import CheckpointError, ConfigError
from engine.models.convert import convert
from engine.models.loader import load_config, load_model, save_model
from tests.models.variants import build

Weights = dict[str, Tensor]


def weights() -> Weights:
    torch.manual_seed(0)
    state: Weights = minLM(
        num_tokens=11, dim=8, depth=2, use_lstm=True, enable_conv=True
    ).state_dict()
    return state


def tokenizer_of(size: int) -> str:
    words = {f"w{id}": id for id in range(size)}
    text: str = Tokenizer(models.WordLevel(words, unk_token="w0")).to_str()
    return text


def loaded(folder: Path) -> Weights:
    return load_model(folder, "cpu")[0].state_dict()


@pytest.fixture
def expected(tmp_path: Path) -> Weights:
    save_file(weights(), tmp_path / "expected.safetensors")
    convert(tmp_path / "expected.safetensors", tmp_path / "expected")
    return loaded(tmp_path / "expected")


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "pytorch_model.bin", "ckpt.tar"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda w: w,
        lambda w: {"model": w, "step": 3},
        lambda w: {"state_dict": w, "epoch": 1},
        lambda w: {"model_state_dict": w, "optimizer_state_dict": {"state": {}}},
        lambda w: {"module." + name: tensor for name, tensor in w.items()},
        lambda w: {"model": {"_orig_mod.module." + name: t for name, t in w.items()}},
        lambda w: {"module._orig_mod." + name: t for name, t in w.items()},
        lambda w: {name: torch.nn.Parameter(tensor) for name, tensor in w.items()},
    ],
)
def test_where_training_scripts_put_their_weights(
    name: str, wrap: Callable[[Weights], object], expected: Weights, tmp_path: Path
) -> None:
    torch.save(wrap(weights()), tmp_path / name)
    convert(tmp_path / name, tmp_path / "out")
    got = loaded(tmp_path / "out")
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


class Bomb:
    """A pickle of it creates a file when it is loaded without weights_only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_nothing_is_unpickled_but_tensors(tmp_path: Path) -> None:
    torch.save({"model": weights(), "args": Bomb(tmp_path / "exploded")}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"contains Python objects .*never unpickled"):
        convert(tmp_path / "w.pt", tmp_path / "out")
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded"), protocol=2))
    with pytest.raises(CheckpointError):
        convert(tmp_path / "bare.pt", tmp_path / "out")
    assert not (tmp_path / "exploded").exists()
    assert not (tmp_path / "out").exists()


def _save(content: object) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path)


def _without(name: str) -> Callable[[Path], None]:
    return _save({key: tensor for key, tensor in weights().items() if key != name})


def _with(name: str, *shape: int) -> Callable[[Path], None]:
    return _save({**weights(), name: torch.zeros(shape)})


def _with_kernel_of_one() -> Weights:
    state: Weights = minLM(
        num_tokens=11, dim=8, depth=1, enable_conv=True, conv_kernel_size=1
    ).state_dict()
    return state


def _truncated(path: Path) -> None:
    torch.save(weights(), path)
    path.write_bytes(path.read_bytes()[:-400])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "w.pt: no such file"),
        (lambda path: path.write_bytes(b""), "damaged, or neither"),
        (lambda path: path.write_bytes(b"\x80\x02garbage" * 99), "damaged, or neither"),
        (lambda path: path.write_text("ROMEO:"), "damaged, or neither"),
        (_truncated, "damaged, or neither"),
        (_save([1, 2]), "contains no state dict, .* but list"),
        (_save({}), r"contains no state dict, .* but \[\]"),
        (_save({"step": 3, "loss": 0.5}), r"but \['step', 'loss'\]"),
        (_save({"model": {"step": 3}}), r"but \['step'\]"),
        (_without("token_emb.weight"), "'token_emb.weight' is missing"),
        (_without("to_logits.weight"), "'to_logits.weight' is missing"),
        (_without("norm.weight"), "'norm.weight' is missing"),
        (_without("layers.1.1.weight"), "'layers.1.1.weight' is missing"),
        (_without("layers.1.2.to_hidden_and_f_i_gate.weight"), "'layers.1.2.to_hidden_and_gate"),
        (_without("layers.1.2.to_out.weight"), "has 36 rows; with 8 channels it must have 24"),
        (_without("layers.0.0.net.1.weight"), r"layers.0.0 has 1 weights \(layers.0.0.net.0\)"),
        (_without("layers.0.4.2.weight"), "layers.0.4 has 1 weights"),
        (_without("layers.1.4.2.bias"), "layers.1 differs from layers.0: its mlp.down.bias"),
        (_with("layers.0.4.4.weight", 8, 8), "layers.0.4 has 3 weights"),
        (_with("layers.0.attention.weight", 8, 8), "'layers.0.attention.weight'.*a known layout"),
        (_with("layers.0.1.weight", 9), r"'layers.0.1.weight' has shape \[9\], .* \[8\]"),
        (_with("layers.0.1.weight", 8, 1), r"'layers.0.1.weight' has shape \[8, 1\]"),
        (_with("to_logits.weight", 12, 8), r"'to_logits.weight' has shape \[12, 8\]"),
        (_save(_with_kernel_of_one()), "conv_kernel is 1; allowed"),
        (_save({**weights(), "token_emb.weight": torch.ones(11, 8).int()}), "is torch.int32"),
        (_save({**weights(), "norm.weight": torch.ones(8).char()}), "'norm.weight' is torch.int8"),
        (_save({"weight": torch.ones(3)}), "'token_emb.weight' is missing; supported are"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_refused(
    write: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "w.pt", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} <= {"w.pt"}


def test_a_mingru_that_lost_its_out_projection_is_no_minlstm(tmp_path: Path) -> None:
    """At expansion 1.5 its gates have three times the model's width, as a minLSTM's at 1 have."""
    state = minLM(num_tokens=11, dim=8, depth=1, expansion=1.5).state_dict()
    del state["layers.0.2.to_out.weight"]
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"'layers.0.2.to_out.weight' is missing"):
        convert(tmp_path / "w.pt", tmp_path / "out")


def test_a_damaged_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(weights(), path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        convert(path, tmp_path / "out")


def test_the_keywords_replace_what_the_weights_show(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "w.pt")
    config = convert(
        tmp_path / "w.pt",
        tmp_path / "out",
        dtype="bfloat16",
        normalize_gates=False,
        norm_eps=1e-5,
        eos_token_id=10,
    )
    assert (config.dtype, config.normalize_gates) == ("bfloat16", False)
    assert (config.norm_eps, config.eos_token_id) == (1e-5, 10)
    model, read = load_model(tmp_path / "out", "cpu")
    assert read == config
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match="eos_token_id is 11"):
        convert(tmp_path / "w.pt", tmp_path / "other", eos_token_id=11)
    assert not (tmp_path / "other").exists()


def test_several_tokens_may_end_a_text(tmp_path: Path) -> None:
    """Those that are named, else those of a generation_config.json beside the weights."""
    torch.save(weights(), tmp_path / "w.pt")
    assert convert(tmp_path / "w.pt", tmp_path / "none").eos_token_ids == ()
    given = convert(tmp_path / "w.pt", tmp_path / "given", eos_token_id=[10, 2])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    found = convert(tmp_path / "w.pt", tmp_path / "found")
    own = convert(tmp_path / "w.pt", tmp_path / "own", eos_token_id=5)
    copy = convert(tmp_path / "found", tmp_path / "copy")
    for name, config, ids in (
        ("given", given, (10, 2)),
        ("found", found, (3, 4)),
        ("own", own, (5,)),
        ("copy", copy, (3, 4)),
    ):
        assert config.eos_token_ids == load_config(tmp_path / name).eos_token_ids == ids
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 11}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is 11"):
        convert(tmp_path / "w.pt", tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.float64, "float32"),
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
    ],
)
def test_the_dtype_is_the_source_s(dtype: torch.dtype, stored: str, tmp_path: Path) -> None:
    torch.save({name: tensor.to(dtype) for name, tensor in weights().items()}, tmp_path / "w.pt")
    config = convert(tmp_path / "w.pt", tmp_path / "out")
    assert config.dtype == stored
    assert config.norm_eps == torch.finfo(torch.float32).eps  # RMSNorm computes in float32


def test_a_tensor_without_values_is_refused(tmp_path: Path) -> None:
    state = {**weights(), "to_logits.weight": torch.ones(1).expand(2**20, 2**20)}
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"w\.pt: tensor 'to_logits\.weight' of .* repeats 4"):
        convert(tmp_path / "w.pt", tmp_path / "out")


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    state = weights()
    state["to_logits.weight"] = state["token_emb.weight"]
    torch.save(state, tmp_path / "w.pt")
    convert(tmp_path / "w.pt", tmp_path / "out")
    got = loaded(tmp_path / "out")
    assert torch.equal(got["head.weight"], got["embedding.weight"])


def test_a_tokenizer_beside_the_weights_comes_along(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "w.pt")
    convert(tmp_path / "w.pt", tmp_path / "without")
    assert not (tmp_path / "without" / "tokenizer.json").exists()
    text = tokenizer_of(11)
    (tmp_path / "tokenizer.json").write_text(text)
    convert(tmp_path / "w.pt", tmp_path / "with")
    assert (tmp_path / "with" / "tokenizer.json").read_text() == text
    assert not (tmp_path / "with" / "chat_template.jinja").exists()
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    names += ("special_tokens_map.json", "starts.json")
    for name in names:
        (tmp_path / name).write_text(name)
    convert(tmp_path / "w.pt", tmp_path / "chat")
    for name in names:
        assert (tmp_path / "chat" / name).read_text() == name


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Whether it is given, or beside the weights, or in a folder."""
    torch.save(weights(), tmp_path / "w.pt")
    given, beside = tmp_path / "given.json", tmp_path / "tokenizer.json"
    message = "has token id 11, but the model's vocabulary ends at 10"
    given.write_text(tokenizer_of(12))
    with pytest.raises(CheckpointError, match=rf"given\.json: {message}"):
        convert(tmp_path / "w.pt", tmp_path / "out", tokenizer=given)
    convert(tmp_path / "w.pt", tmp_path / "folder")
    for path in (beside, tmp_path / "folder" / "tokenizer.json"):
        path.write_text(tokenizer_of(12))
    for source in ("w.pt", "folder"):
        with pytest.raises(CheckpointError, match=rf"tokenizer\.json: {message}"):
            convert(tmp_path / source, tmp_path / "out")
    beside.write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer: "):
        convert(tmp_path / "w.pt", tmp_path / "out")
    given.write_text(tokenizer_of(11))
    assert not (tmp_path / "out").exists()
    convert(tmp_path / "w.pt", tmp_path / "out", tokenizer=given)


def test_a_checkpoint_folder_is_saved_anew(tmp_path: Path) -> None:
    model = build({"cell": "mingru", "conv_kernel": 3, "learned_initial_state": True})
    save_model(tmp_path / "in", model, model.config, "float32")
    config = convert(tmp_path / "in", tmp_path / "out", dtype="float16")
    assert config.dtype == "float16" and config.conv_kernel == 3
    got = loaded(tmp_path / "out")
    assert all(torch.equal(got[n], t.half()) for n, t in model.state_dict().items())


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a folder without config\.json"):
        convert(tmp_path, tmp_path / "out")


def test_an_existing_destination_is_left_alone(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "w.pt")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    for destination in (tmp_path / "full", tmp_path / "w.pt"):
        with pytest.raises(CheckpointError, match="exists"):
            convert(tmp_path / "w.pt", destination)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious"]
    (tmp_path / "empty").mkdir()
    convert(tmp_path / "w.pt", tmp_path / "empty")
    assert json.loads((tmp_path / "empty" / "config.json").read_text())["cell"] == "minlstm"


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(weights(), tmp_path / "w.pt")
    (tmp_path / "starts.json").write_text("[]")

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(CheckpointError, match="out: cannot be written: No space left"):
        convert(tmp_path / "w.pt", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"w.pt", "starts.json"}
