"""The torchrec versions that the plug-in is written for; no other file looks at torchrec's version.

The hooks that it overrides have the same signatures in all of them. Where a call differs (a planner argument renamed in
1.7), the override takes ``*args, **kwargs`` and passes them on. What else differs is here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import torchrec
from torchrec.distributed.types import ModuleSharder

OLDEST = (1, 6)
NEWEST_TESTED = (1, 9)


def release(version: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else OLDEST


def estimators_sharders(sharders: Mapping[str, ModuleSharder[Any]]) -> dict[str, Any]:
    """What torchrec's estimators take beside the options: the sharders by module type; since 1.7, data of them."""
    if release(torchrec.__version__) < (1, 7):
        return dict(sharders)
    from torchrec.distributed.planner.utils import build_sharder_data_map  # not in a torchrec that is too old

    return build_sharder_data_map(dict(sharders))


def check_torchrec(version: str) -> None:
    """Raises ``ImportError`` for a torchrec that is too old, warns of one that is newer than any that was tested."""
    found = release(version)
    if found < OLDEST:
        raise ImportError(
            f"flowtt_torchrec.distributed needs torchrec {OLDEST[0]}.{OLDEST[1]} or later, found {version}; "
            "upgrade torchrec together with its fbgemm-gpu and torch"
        )
    if found > NEWEST_TESTED:
        warnings.warn(
            f"torchrec {version} is newer than {NEWEST_TESTED[0]}.{NEWEST_TESTED[1]}, the newest that "
            "flowtt_torchrec.distributed was tested with",
            stacklevel=3,
        )


check_torchrec(torchrec.__version__)
