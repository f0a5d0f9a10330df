"""minserve on a Ray cluster: `serve run service.ray_app:app model=library-mingru replicas=2`.

Settings are MINSERVE_* variables of the command's environment, and arguments by their names, which
win. Arguments of the deployment: `replicas`, `max_replicas`, `cpus` and `gpus` of each replica, and
`python_proxy=1` where Ray's proxy in Python or handles send the requests, in place of HAProxy.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from engine.errors import ConfigError
from service.cluster.deployment import Scale, make_application
from service.settings import Settings
from service.terminal.options import describe

OF_SCALE = {"replicas": ("replicas", int), "max_replicas": ("most", int), "cpus": ("cpus", float),
            "gpus": ("gpus", float), "python_proxy": ("python_proxy", int)}  # fmt: skip


def app(arguments: dict[str, str]) -> Any:
    """Return the Ray Serve application for the arguments of `serve run` or of a config file.

    Raises ConfigError for unknown arguments and wrong values.
    """
    scale: dict[str, Any] = {}
    for name in list(arguments):
        if name in OF_SCALE:
            field, kind = OF_SCALE[name]
            try:
                scale[field] = kind(arguments[name])
            except (TypeError, ValueError):  # TypeError: null in a config file
                raise ConfigError(
                    f"{name} is {arguments[name]!r}; allowed: a number", param=name
                ) from None
    given = {name: value for name, value in arguments.items() if name not in OF_SCALE}
    unknown = sorted(set(given) - set(Settings.model_fields))
    if unknown:
        raise ConfigError(
            f"unknown argument {unknown[0]!r}; allowed: {', '.join(OF_SCALE)}, and the settings of "
            "minserve serve, such as model or state_store"
        )
    try:
        settings = Settings(**given)  # type: ignore[arg-type]  # pydantic reads the texts
    except ValidationError as error:
        raise ConfigError(describe(error.errors()[0], ())) from error
    return make_application(settings, Scale(**scale))
