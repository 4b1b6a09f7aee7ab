# SPDX-License-Identifier: Apache-2.0
"""Runs against a server: questions and synthetic loads, journaled item by item."""
