# SPDX-License-Identifier: Apache-2.0
"""Result files: their schema, statistics, comparison, and the page that shows them."""
