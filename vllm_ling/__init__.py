# SPDX-License-Identifier: Apache-2.0
"""vllm-ling: a vLLM plugin that serves Ling-3.0 models fast to one user, and says what it did.

Importing this package imports neither torch nor vLLM: vLLM loads the entry point in every process.
"""

__version__ = "0.1.0"
