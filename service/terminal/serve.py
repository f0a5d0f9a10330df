"""`minserve serve`: turns its options into settings and runs the server."""

from __future__ import annotations

from typer import Exit

from engine.errors import ConfigError
from service.terminal import options as options


def serve(
    host: options.Host = None,
    port: options.Port = None,
    uds: options.Uds = None,
    model: options.ServedModel = None,
    model_name: options.ModelName = None,
    device: options.ServedDevice = None,
    dtype: options.ServedDtype = None,
    quantize: options.ServedQuantize = None,
    state_dtype: options.ServedStateDtype = None,
    max_slots: options.MaxSlots = None,
    max_waiting: options.MaxWaiting = None,
    max_waiting_tokens: options.MaxWaitingTokens = None,
    max_step_tokens: options.MaxStepTokens = None,
    share_slots: options.ShareSlots = None,
    host_state_bytes: options.HostStateBytes = None,
    state_folder: options.StateFolder = None,
    state_store: options.StateStore = None,
    state_store_file: options.StateStoreFile = None,
    state_sync: options.StateSync = None,
    disk_state_bytes: options.DiskStateBytes = None,
    disk_cache_bytes: options.DiskCacheBytes = None,
    state_ttl: options.StateTtl = None,
    max_states: options.MaxStates = None,
    threads: options.Threads = None,
    cuda_graphs: options.CudaGraphs = None,
    deterministic: options.ServedDeterministic = None,
    tuning_cache: options.TuningCache = None,
    max_tokens: options.MaxTokens = None,
    max_prompts: options.MaxPrompts = None,
    max_body_bytes: options.MaxBodyBytes = None,
    stream_interval: options.StreamInterval = None,
    load_timeout: options.LoadTimeout = None,
    request_timeout: options.RequestTimeout = None,
    max_request_timeout: options.MaxRequestTimeout = None,
    drain_timeout: options.DrainTimeout = None,
    keep_alive_timeout: options.KeepAliveTimeout = None,
    engines: options.Engines = None,
    api_workers: options.ApiWorkers = None,
    engine_restarts: options.EngineRestarts = None,
    hang_timeout: options.HangTimeout = None,
    log_level: options.LogLevel = None,
    access_log: options.AccessLog = None,
    traces: options.Traces = None,
    api_keys_file: options.ApiKeysFile = None,
    admin_key_file: options.AdminKeyFile = None,
    metrics_access: options.MetricsAccess = None,
    tls_certificate: options.TlsCertificate = None,
    tls_key: options.TlsKey = None,
    playground: options.Playground = None,
    cors_origin: options.CorsOrigin = None,
    session_header: options.SessionHeader = None,
) -> None:
    """Serve a model over HTTP.

    SIGTERM or Ctrl-C lets requests in flight finish, for up to --drain-timeout seconds. A second
    signal ends them with what they have (a SIGTERM only if a second has passed).

    Every option has an environment variable (MINSERVE_PORT for --port); options win. Further
    settings are variables only: MINSERVE_API_KEYS, MINSERVE_ADMIN_KEY, MINSERVE_MAX_N and others.
    The table in docker/README.md lists them all. Defaults are in brackets.
    """
    each = locals().copy()
    given = {name: value for name, value in each.items() if value not in (None, [])}
    from pydantic import ValidationError

    from service.server.server import serve as run
    from service.settings import Settings

    try:
        settings = Settings(**given)
    except ValidationError as error:
        raise ConfigError(options.describe(error.errors()[0], each)) from error
    if settings.uds is not None and not (host is None and port is None):
        raise ConfigError(
            "--host or --port is given together with a Unix socket (--uds, MINSERVE_UDS); allowed: "
            "one of them"
        )
    raise Exit(run(settings))
