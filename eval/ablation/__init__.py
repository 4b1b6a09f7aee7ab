# SPDX-License-Identifier: Apache-2.0
"""One server per stage, one table, and the gap between synthetic load and real text."""
