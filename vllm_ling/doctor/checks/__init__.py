# SPDX-License-Identifier: Apache-2.0
"""The checks, by subject; importing this package registers them all, in the order in which they are shown."""

import importlib

for _subject in (
    "sources",
    "command",
    "plugin",
    "ranks",
    "checkpoint",
    "head",
    "experts",
    "decode",
    "drafting",
    "graphs",
    "memory",
    "requests",
):
    importlib.import_module(f"{__name__}.{_subject}")
