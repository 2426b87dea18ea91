"""Names the files of a container that decide how any test runs."""

import re

RUNNER_PATH = re.compile(
    r"/.*/(?:site|dist)-packages/(?:_?pytest|pluggy|iniconfig|py|xdist|unittest2|nose|tox"
    r"|hypothesis|pytest_[^/]*|(?:site|user)customize)(?:/.*)?\.\w+"
    r"|/(?:.*/)?lib(?:32|64)?/(?:(?:python|pypy)[23]?(?:\.\d+)?/(?!(?:site|dist)-packages(?:/|$)).+"
    r"|(?:python|pypy)\d+\.zip)"
    r"|/.*bin/(?:python[\d.]*|py\.?test|bash|sh|dash|env|git|tox|make|prove|node|ruby|perl|java|go)"
    r"|/(?:etc/ld\.so\.preload|etc/bash\.bashrc|etc/profile|root/\.bashrc|etc/passwd)"
)
"""Paths of files that run or find tests: runners and their plugins, interpreters with their whole
standard library, shells."""

USED_BY_RUNNER = re.compile(
    r"/.*/(?:site|dist)-packages/(?:packaging|pygments|exceptiongroup|tomli|colorama|attrs?|execnet"
    r"|typing_extensions|coverage|pip|setuptools|pkg_resources|_distutils_hack|wheel)(?:/.*|\.\w+)"
)
"""Packages that pytest, its plugins and Python's start import from the image. Those that are added
are not among them, because many packages install them."""

FINDS_LIBRARY = re.compile(r"/(?:.*/)?(?:pyvenv\.cfg|pybuilddir\.txt|[^/]*\._pth)")
"""Files beside an interpreter, or in the folder above, that tell it where its library is."""

PROGRAM_PATH = re.compile(
    r"/(?:usr/(?:local/)?)?s?bin/[^/]+|/(?:usr/)?lib(?:32|64)?/(?:.*/)?lib[^/]+\.so.*"
)
"""Paths of the system's programs and libraries."""
