"""make_supervisor: builds the supervisor of a server's engines from the settings."""

from __future__ import annotations

from engine.errors import CheckpointError, EngineError
from engine.protocol.events import ModelInfo
from engine.supervisor.supervisor import Supervisor, SupervisorConfig
from service.observability import merge as samples
from service.settings import Settings
from service.text.chat_template import load_text


def make_supervisor(settings: Settings, engine: str | None = None) -> Supervisor:
    """Return a supervisor that has not been started.

    `engine`: the factory of the engine, for tests (see ProcessTransport). Raises ConfigError.
    """
    rules = SupervisorConfig(
        restarts=settings.engine_restarts,
        window=settings.restart_window,
        load_timeout=settings.load_timeout,
        hang_timeout=settings.hang_timeout,
    )
    return Supervisor(
        settings.engine_config(), rules, check=_check_text, fold=samples.fold, engine=engine
    )


async def _check_text(info: ModelInfo) -> None:
    """Raise CheckpointError if API processes could not use the model's tokenizer."""
    try:
        await load_text(info)
    except EngineError:
        raise
    except Exception as error:
        reason = f"{info.folder}: its tokenizer cannot be used: {type(error).__name__}: {error}"
        raise CheckpointError(reason) from error
