"""Takes a model's tensors from a state dict: each exactly once, with its shape checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from engine.errors import CheckpointError
from engine.models.family import StoredTensor
from engine.models.state_dicts import HELD_AS


class StateDictSource:
    """A state dict from which tensors are taken; tensors left at the end are unknown."""

    def __init__(self, stored: Mapping[str, Tensor], supported: str) -> None:
        """Prepare to take every tensor of `stored`.

        Args:
            stored: tensors by name.
            supported: the end of every error's message, which says what models are supported.
        """
        self.left = dict(stored)
        self._supported = supported

    def error(self, message: str) -> CheckpointError:
        """Return an error that ends with what is supported."""
        return CheckpointError(f"{message}; {self._supported}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that is left."""
        return tuple(self.left[name].shape)

    def take(self, name: str, *shape: int | None) -> StoredTensor:
        """Remove and return a tensor, whose shape must be `shape` (None: any size).

        Raises CheckpointError if it is missing, or has another shape or a type that is not held.
        """
        if name not in self.left:
            raise self.error(f"tensor {name!r} is missing")
        tensor = self.left.pop(name)
        if tensor.dtype not in HELD_AS:
            raise self.error(f"tensor {name!r} is {tensor.dtype}")
        size = tuple(tensor.shape)
        if len(size) != len(shape) or any(
            want not in (None, one) for want, one in zip(shape, size, strict=True)
        ):
            wanted = ", ".join("*" if one is None else str(one) for one in shape)
            raise self.error(
                f"tensor {name!r} has shape {list(size)}, but the other tensors require [{wanted}]"
            )
        return StoredTensor(name, size)

    def finish(self) -> None:
        """Raise CheckpointError if tensors are left."""
        if self.left:
            named = [f"{name!r} {list(tensor.shape)}" for name, tensor in self.left.items()]
            more = f" (and {len(named) - 3} more)" if len(named) > 3 else ""
            raise self.error(f"tensor {', '.join(named[:3])}{more} is not part of a known layout")


class LanguageModelSource(StateDictSource):
    """A state dict with an embedding and a head, each in a module of one of several names."""

    def __init__(
        self,
        stored: Mapping[str, Tensor],
        supported: str,
        *,
        embeddings: Collection[str],
        heads: Collection[str],
    ) -> None:
        """Prepare to take every tensor of `stored`.

        Args:
            stored, supported: as for StateDictSource.
            embeddings: names that the embedding's module may have, behind any prefix.
            heads: names that the head's module may have, behind any prefix.
        """
        super().__init__(stored, supported)
        self._embeddings = embeddings
        self._heads = heads

    def take_embedding(self) -> StoredTensor:
        """Remove and return the embedding's matrix.

        Raises CheckpointError unless there is exactly one.
        """
        return self.take(self._module(self._embeddings, "embedding") + ".weight", None, None)

    def take_head(
        self, vocabulary: int, width: int
    ) -> tuple[StoredTensor | None, StoredTensor | None]:
        """Remove and return the head's matrix and bias; None where there is none.

        Raises CheckpointError if there are several heads.
        """
        weights = self._modules(self._heads, "weight")
        biases = self._modules(self._heads, "bias")
        head = None
        if weights:
            head = self.take(self._module(self._heads, "head") + ".weight", vocabulary, width)
        if not biases or (weights and biases != weights):
            return head, None  # a bias of another module is unknown
        return head, self.take(f"{biases[0]}.bias", vocabulary)

    def _module(self, names: Collection[str], what: str) -> str:
        """Return the only module of one of these names that has a weight."""
        modules = self._modules(names, "weight")
        if len(modules) != 1:
            several = f"several ({', '.join(modules)})" if modules else "none"
            raise self.error(
                f"there must be one tensor of the {what}, named .weight behind"
                f" {', '.join(sorted(names))}; there are {several}"
            )
        return modules[0]

    def _modules(self, names: Collection[str], kind: str) -> list[str]:
        paths = [name.rpartition(".") for name in self.left]
        return [at for at, _, last in paths if last == kind and at.rpartition(".")[2] in names]
