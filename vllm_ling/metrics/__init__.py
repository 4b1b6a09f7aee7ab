# SPDX-License-Identifier: Apache-2.0
"""What the plugin adds to the server's own /metrics, a Grafana dashboard and alert rules for it."""
