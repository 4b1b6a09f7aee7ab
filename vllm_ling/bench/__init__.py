# SPDX-License-Identifier: Apache-2.0
"""Speed measurements on a GPU with random weights made there."""
