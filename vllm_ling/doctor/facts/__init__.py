# SPDX-License-Identifier: Apache-2.0
"""Sources of facts, one file each; every probe is guarded, and what could not be read is recorded with its reason."""
