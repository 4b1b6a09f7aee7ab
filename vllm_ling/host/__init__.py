# SPDX-License-Identifier: Apache-2.0
"""What the CPU does in a step of vLLM's V2 model runner, without the parts that a Ling batch pays for nothing."""
