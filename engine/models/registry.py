"""Registry of model families: finds the family of a config.json or a config.

A family is in a folder of engine/models. A config.json in minserve's form names it in `family`
("minrnn" if absent); one of another project is recognised by `architectures` or `model_type`, or,
if it has neither, by a field that only that project writes (`Family.marks`). A state dict is
recognised by the names and shapes of its tensors (`Family.recognises`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engine.config import OWN_MODEL_TYPE, ModelConfig
from engine.errors import ConfigError
from engine.models.family import Family
from engine.models.gated_rnn.family import GruFamily, LstmFamily
from engine.models.hgrn.family import HgrnFamily
from engine.models.language_model import LanguageModel
from engine.models.mamba.family import MambaFamily
from engine.models.mamba2.family import Mamba2Family
from engine.models.minrnn.family import MinRnnFamily
from engine.models.sru.family import SruFamily

DEFAULT = MinRnnFamily()
FAMILIES: tuple[Family, ...] = (
    DEFAULT,
    HgrnFamily(),
    MambaFamily(),
    Mamba2Family(),
    GruFamily(),
    LstmFamily(),
    SruFamily(),
)


def family_named(name: object) -> Family:
    """Return the family with this name. Raises ConfigError."""
    for family in FAMILIES:
        if family.name == name:
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise ConfigError(f"family is {name!r}; allowed: {known}", param="family")


def family_of(config: ModelConfig) -> Family:
    """Return the family of this config."""
    return family_named(config.family)


def build(config: ModelConfig) -> LanguageModel:
    """Return an untrained model of this config, on torch's default device."""
    return family_of(config).build(config)


def is_own(values: Mapping[str, Any]) -> bool:
    """Return whether a config.json, as parsed, is in minserve's form, not another project's."""
    return values.get("model_type", OWN_MODEL_TYPE) == OWN_MODEL_TYPE and (
        "architectures" not in values and _marked_family(values) is None
    )


def _marked_family(values: Mapping[str, Any]) -> Family | None:
    """Return the family whose published config.json files have neither name, only a mark."""
    if "architectures" in values or "model_type" in values:
        return None
    marked = (family for family in FAMILIES if family.marks & values.keys())
    return next((family for family in marked if family.claims(values)), None)


def published_family(values: Mapping[str, Any]) -> Family:
    """Return the family of another project's config.json, as parsed.

    Raises ConfigError, which lists the known architectures, if there is none.
    """
    marked = _marked_family(values)
    if marked is not None:
        return marked
    architectures = values.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    named = {name for name in listed if isinstance(name, str)}
    for family in FAMILIES:
        for name in sorted(named & family.refused.keys()):
            raise ConfigError(
                f"architectures is {architectures!r}, which is not served: {family.refused[name]}",
                param="architectures",
            )
        known = named & family.architectures or (
            not named and values.get("model_type") in tuple(family.model_types)
        )
        if known and family.claims(values):
            return family
    names = sorted({name for family in FAMILIES for name in family.architectures})
    raise ConfigError(
        f"architectures is {architectures!r} and model_type {values.get('model_type')!r}, which "
        f"minserve does not serve; allowed: {', '.join(names) or 'none'}, or model_type "
        f"{OWN_MODEL_TYPE!r}",
        param="architectures",
    )


def config_from_dict(values: Mapping[str, Any]) -> ModelConfig:
    """Make a config from a config.json, as parsed. Raises ConfigError."""
    if not is_own(values):
        return published_family(values).published_config(values)
    family = family_named(values.get("family", DEFAULT.name))
    return family.config_class.from_dict(values)


def state_dict_family(stored: Mapping[str, Tensor], name: str | None) -> Family:
    """Return the family of a state dict; `name` is that of the family, None: it is recognised.

    Raises ConfigError if no family with layouts of state dicts has this name.
    """
    families = [family for family in FAMILIES if family.reads_state_dicts]
    if name is None:
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        return next((family for family in families if family.recognises(shapes)), DEFAULT)
    for family in families:
        if family.name == name:
            return family
    allowed = ", ".join(family.name for family in families)
    raise ConfigError(f"family is {name!r}; allowed for a state dict: {allowed}", param="family")


def check_options(family: Family, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that models of this family do not have."""
    for name in sorted(options.keys() - family.state_dict_options):
        value = options[name]
        raise ConfigError(
            f"{name} is {value}; allowed: none for a {family.name} model, which has no such option",
            param=name,
        )
