# SPDX-License-Identifier: Apache-2.0
"""Engines in process, parity, draft studies, training of tiny-ling."""
