#!/usr/bin/env bash
# Formatting, lint and types of everything; changes nothing. Needs what pyproject.toml lists as the group lint.
set -euo pipefail
cd "$(dirname "$0")/.."

find csrc -name '*.cc' -o -name '*.h' | sort | xargs clang-format --dry-run -Werror
echo "clang-format: $(find csrc -name '*.cc' -o -name '*.h' | wc -l) files as they should be"
ruff check .
ruff format --check .
mypy
lint-imports --no-logo --no-cache
