# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling doctor`: facts -> checks -> findings, so that a configuration that is merely slow or wrong gets noticed.

`facts/` reads one source per file (checkpoint, flags, environment, GPU, log, live server) and never raises;
`checks/` are pure functions from facts to a verdict; `registry` runs them; `render` shows them; `run` is the command.
"""
