"""Names the files of a container that decide how any test runs."""

import re

RUNNER_PATH = re.compile(
    r"/.*/(?:site|dist)-packages/(?:_?pytest|pluggy|iniconfig|py|xdist|unittest2|nose|tox"
    r"|hypothesis|pytest_[^/]*|(?:site|user)customize)(?:/.*)?\.(?!pyc$)\w+"
    r"|/.*/python3?(?:\.\d+)?/(?!(?:site|dist)-packages/)(?:[^/]+|(?:unittest|importlib)/[^/]+)\.py"
    r"|/.*bin/(?:python[\d.]*|py\.?test|bash|sh|dash|env|git|tox|make|prove|node|ruby|perl|java|go)"
    r"|/(?:etc/ld\.so\.preload|etc/bash\.bashrc|etc/profile|root/\.bashrc|etc/passwd)"
)
"""Paths of files that run or find tests: runners and their plugins, the standard library,
interpreters, shells. Compiled files and folders are not among them, because any run may write
them."""

PROGRAM_PATH = re.compile(
    r"/(?:usr/(?:local/)?)?s?bin/[^/]+|/(?:usr/)?lib(?:32|64)?/(?:.*/)?lib[^/]+\.so.*"
)
"""Paths of the system's programs and libraries."""
