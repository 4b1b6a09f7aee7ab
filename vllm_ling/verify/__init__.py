# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling verify`: what only the owner of the real weights can check, as one command with a page to attach."""
