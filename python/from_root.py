"""Build backend of the pyproject.toml in the repository's root: scikit-build-core, run in this folder."""

import os

os.chdir(os.path.dirname(os.path.abspath(__file__)))

from scikit_build_core.build import *  # noqa: E402, F403
