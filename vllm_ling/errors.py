# SPDX-License-Identifier: Apache-2.0
"""The one exception whose message is meant for the person at the keyboard."""


class LingError(ValueError):
    """A problem the user can mend: the message is one line and names the option, file or tensor."""
