"""Libraries that only translation needs: imported late, and missed in plain words."""

import importlib
from typing import Any

from penstock.errors import ConfigError


def optional_library(module: str, what_for: str) -> Any:
    """Import `module`, which belongs to the extra "translation".

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise ConfigError(
            f"{what_for} needs {library}, which is not installed; "
            "install it with: pip install 'penstock[translation]'"
        ) from error
