# SPDX-License-Identifier: Apache-2.0
"""The fused decode path: a step of one to eight tokens through our kernels from embedding to final norm."""
