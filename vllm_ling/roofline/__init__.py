# SPDX-License-Identifier: Apache-2.0
"""The byte model: what a decode token or a speculative round must read, and how long a machine's memory needs for it.

`models` names the model, `bytes` counts, `machines` knows bandwidths, `predict` puts them together, `report` prints.
"""
