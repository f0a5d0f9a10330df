"""The server's settings, read from MINSERVE_* environment variables and from options.

This is the only module that reads MINSERVE_* variables of the service. `minserve serve` sets the
same fields from its options, which win over the environment. The description of each setting is
in `service.terminal.options` or, for settings without an option, in
`service.terminal.settings_table`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from engine.config import MOST_ENGINES, EngineConfig, StateSync
from engine.errors import ConfigError
from service.secret_files import read_secret

PREFIX = "MINSERVE_"
# MINSERVE_ variables that other code reads: the kernels, builds and docker/compose.yaml.
OF_OTHERS = frozenset(
    {
        "CPU_ISA",
        "CPU_OPTIMIZE",
        "CUDA",
        "CUDA_ARCHS",
        "CUDA_OPTIMIZE",
        "CPUS",
        "DELAYS",
        "MEMORY",
        "PUBLISH",
        "ENGINE_STATE_STORE",
    }
)


def _check_origin(value: str) -> str:
    if not re.fullmatch(r"\*|https?://[^\sA-Z/?#@,]+", value):
        raise ValueError(
            "allowed: *, or an origin as browsers send it: https://HOST or https://HOST:PORT in "
            "lower case, without a path and without a slash at its end"
        )
    return value


Origin = Annotated[str, AfterValidator(_check_origin)]  # * allows every origin


def _split(value: Any) -> Any:
    """Split the value of an environment variable at its commas; return other values unchanged."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


MOST_GRAMMAR_BYTES = 2**20  # the engine's own limit
# Addresses of the proxies whose x-forwarded-proto and x-forwarded-for headers are trusted.
# FORWARDED_ALLOW_IPS is uvicorn's variable.
TRUSTED_PROXIES = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1")

AccessLogFormat = Literal["json", "text", "off"]

# Headers that cannot name a session, since they hold a secret or say how the message is read.
NO_SESSION_HEADERS = (
    "authorization", "connection", "content-encoding", "content-length", "content-type", "cookie",
    "expect", "host", "te", "trailer", "transfer-encoding", "upgrade", "x-api-key",
)  # fmt: skip


def _check_session_header(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}", value):
        raise ValueError("allowed: the name of a header, such as x-session-id")
    if value.lower() in NO_SESSION_HEADERS:
        raise ValueError(
            f"allowed: a header of its own, such as x-session-id; none of "
            f"{', '.join(NO_SESSION_HEADERS)}"
        )
    return value


class Settings(BaseSettings):
    """The settings of one server, immutable.

    Raises pydantic.ValidationError for unknown settings and for values that are out of range.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", allow_inf_nan=False, frozen=True
    )

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)  # 0 = any free port
    uds: Path | None = None  # a Unix socket to listen on instead of host and port
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "info"

    access_log: AccessLogFormat = "off"  # one line per request on stdout

    # OpenTelemetry spans. The SDK reads the OTEL_* variables.
    traces: Literal["otlp", "off"] = "off"

    # Keys. They are never options, because other users can read the arguments of a process.
    api_keys: SecretStr | None = None  # name:key, separated by commas
    api_keys_file: Path | None = None  # one name:key or name key per line
    admin_key: SecretStr | None = None
    admin_key_file: Path | None = None
    metrics_access: Literal["open", "key", "admin"] = "open"  # who reads /metrics and /load

    # Each engine. engine.config.EngineConfig checks the values.
    model: str = EngineConfig.model
    model_name: str | None = None  # the name in requests and answers; None = the checkpoint's name
    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "none"
    state_dtype: str = "auto"
    max_slots: int | None = None  # sequences that run at once
    max_step_tokens: int | None = None
    max_waiting: int = 4096  # requests in the queue
    max_waiting_tokens: int = 2**26  # prompt tokens of the requests in the queue
    share_slots: int | None = (
        None  # cached and kept states on the device, beside those of sequences
    )
    host_state_bytes: int | None = None  # cached and kept states in main memory
    state_folder: Path | None = None  # where kept states survive a restart
    state_store: SecretStr | None = None  # URL of the store that several servers share
    state_store_file: Path | None = None  # a file that holds it
    state_sync: StateSync = "write"  # whether an answer waits for the file or for the disk itself
    disk_state_bytes: int = 2**36  # kept states in the state folder
    disk_cache_bytes: int = 0  # cached states in the state folder; 0 = none
    state_ttl: float = 86400.0  # seconds after its last use; a request may name its own
    max_states: int = 2**17  # kept states per key name
    threads: int | None = None
    cuda_graphs: bool = True
    deterministic: bool = False
    tuning_cache: str = "auto"  # or "off", or a folder

    # Processes. Times are seconds.
    engines: int = Field(default=1, ge=1, le=MOST_ENGINES)  # each on its own GPU
    api_workers: int = Field(default=1, ge=1, le=256)  # API processes that share the port
    engine_restarts: int = Field(default=3, ge=0)  # of a crashed engine, within restart_window
    restart_window: PositiveFloat = 600.0
    hang_timeout: float = Field(default=120.0, ge=0)  # until a silent process is killed; 0 = never

    # Connections.
    tls_certificate: Path | None = None  # PEM, with the chain; None = plain HTTP
    tls_key: Path | None = None  # PEM; None = the key is in the certificate's file
    playground: bool = True  # the page at /
    cors_origin: Annotated[tuple[Origin, ...], NoDecode, BeforeValidator(_split)] = ()
    # The header that is a request's session_id; None = x-session-id chooses the engine, if any.
    session_header: Annotated[str, AfterValidator(_check_session_header)] | None = None

    # Limits of one request.
    max_body_bytes: PositiveInt = 16 * 2**20
    max_text_bytes: PositiveInt = 2**30  # the body of POST /v1/states/text
    max_prompts: PositiveInt = 1024  # prompts, texts or continuations
    max_n: PositiveInt = 128  # samples of one prompt
    max_prompt_tokens: PositiveInt = 2**24  # all prompts, counted once per sample or continuation
    max_tokens: PositiveInt = 1_000_000  # generated for one prompt
    max_logprobs: int = Field(default=20, ge=0)  # alternatives per token
    max_reports: PositiveInt = 2**20  # log-probabilities in one answer
    max_unread: PositiveInt = 2**18  # tokens and alternatives that wait for a stream's reader
    max_stop: PositiveInt = 16  # stop strings of one prompt
    max_stop_length: PositiveInt = 1024  # characters
    max_stop_token_ids: PositiveInt = 128  # of one prompt
    max_logit_bias: PositiveInt = 1024  # entries
    # The size of one schema, regular expression or grammar.
    max_grammar_bytes: int = Field(default=2**16, ge=1, le=MOST_GRAMMAR_BYTES)
    max_grammars: PositiveInt = 64  # different ones in one request
    grammar_timeout: PositiveFloat = 1.0  # seconds of processor time to compile one

    stream_interval: int = Field(default=1, ge=1, le=1024)  # tokens per event, unless asked for

    # Timeouts, in seconds.
    load_timeout: PositiveFloat = 600.0
    # For requests that name no timeout; max_request_timeout counts where it is less.
    request_timeout: PositiveFloat = 600.0
    max_request_timeout: PositiveFloat = Field(default=3600.0, validate_default=True)
    drain_timeout: float = Field(default=30.0, ge=0)  # for requests in flight at shutdown
    receive_timeout: PositiveFloat = 60.0  # for a request's head, and again for its body
    keep_alive_timeout: PositiveFloat = 75.0  # of an idle connection; longer than a proxy's own
    stall_timeout: PositiveFloat = 60.0  # until a client that reads nothing is disconnected
    ping_timeout: PositiveFloat = 10.0  # for the engine's answer to /health

    @field_validator("max_request_timeout")
    @classmethod
    def _allows_the_usual(cls, most: float, info: ValidationInfo) -> float:
        usual = info.data.get("request_timeout")
        if usual is not None and most < usual != cls.model_fields["request_timeout"].default:
            raise ValueError(
                f"allowed: at least --request-timeout (MINSERVE_REQUEST_TIMEOUT), {usual:g}"
            )
        return most

    def to_json(self) -> bytes:
        """Return the settings as JSON, secrets included, for another process of this server."""
        values = self.model_dump(mode="json")
        for name, value in self:
            if isinstance(value, SecretStr):
                values[name] = value.get_secret_value()
        return json.dumps(values).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Settings:
        """Return the settings that `to_json` wrote, whatever the environment says."""
        return cls(**json.loads(raw))

    def _state_store_url(self) -> str | None:
        """Return the URL of the shared store, if there is one. Raises ConfigError."""
        if self.state_store is not None and self.state_store_file is not None:
            raise ConfigError(
                "--state-store (MINSERVE_STATE_STORE) and --state-store-file are both given; "
                "allowed: one of them"
            )
        if self.state_store_file is not None:
            where, url = str(self.state_store_file), read_secret(self.state_store_file).strip()
        elif self.state_store is not None:
            where, url = (
                "--state-store (MINSERVE_STATE_STORE)",
                self.state_store.get_secret_value().strip(),
            )
        else:
            return None
        if not url:  # rather than a server that keeps states in memory alone
            raise ConfigError(f"{where} is empty; allowed: the URL of a state store")
        return url

    def engine_config(self) -> EngineConfig:
        """Return the settings of the engine. Raises ConfigError for values it does not allow."""
        return EngineConfig(
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            quantize=self.quantize,
            state_dtype=self.state_dtype,
            max_slots=self.max_slots,
            max_step_tokens=self.max_step_tokens,
            max_waiting=self.max_waiting,
            max_waiting_tokens=self.max_waiting_tokens,
            share_slots=self.share_slots,
            host_state_bytes=self.host_state_bytes,
            state_folder=None if self.state_folder is None else str(self.state_folder),
            state_store=self._state_store_url(),
            state_sync=self.state_sync,
            disk_state_bytes=self.disk_state_bytes,
            disk_cache_bytes=self.disk_cache_bytes,
            state_ttl=self.state_ttl,
            max_states=self.max_states,
            threads=self.threads,
            cuda_graphs=self.cuda_graphs,
            deterministic=self.deterministic,
            tuning_cache=self.tuning_cache,
            engines=self.engines,
        )


def export(variables: Mapping[str, str]) -> None:
    """Set variables of this process for the libraries that read them, unless they are set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def unknown_variables(names: Iterable[str] | None = None) -> dict[str, str | None]:
    """Return the MINSERVE_ variables that nothing reads, each with the likely intended name.

    `names`: the variables to look at; default: those of the environment. The intended name is None
    where no known variable is similar.
    """
    known = [PREFIX + name.upper() for name in Settings.model_fields]
    others = {PREFIX + name for name in OF_OTHERS}
    found: dict[str, str | None] = {}
    for name in sorted(os.environ if names is None else names):
        upper = name.upper()  # settings are read whatever the case
        if upper.startswith(PREFIX) and upper not in others and upper not in known:
            found[name] = next(iter(get_close_matches(upper, known, n=1, cutoff=0.85)), None)
    return found
