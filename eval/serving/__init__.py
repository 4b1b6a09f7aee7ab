# SPDX-License-Identifier: Apache-2.0
"""Servers: started, described, asked, counted, and a mock of one."""
