# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling demo`: tiny-ling, one optimization more per stage."""
