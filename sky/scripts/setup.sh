#!/usr/bin/env bash
# Install Sprawl from the synced checkout into ~/.sprawl/venv.
#
# Usage: bash sky/scripts/setup.sh      (`setup:` of every YAML here; again it is quick)
#   SPRAWL_PYTHON  an interpreter that has Sprawl already: it is only asked whether that is so
#   SPRAWL_EXTRAS  extras to install, for example s3,vllm
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [ -n "${SPRAWL_PYTHON:-}" ]; then
  "$SPRAWL_BIN" -m sprawl.cli --version
  exit 0
fi

extras="${SPRAWL_EXTRAS:+[$SPRAWL_EXTRAS]}"
if command -v uv >/dev/null; then
  [ -x "$SPRAWL_BIN" ] || uv venv --quiet --python 3.11 "$SPRAWL_HOME/venv"
  uv pip install --quiet --python "$SPRAWL_BIN" -e ".$extras"
else
  [ -x "$SPRAWL_BIN" ] || python3 -m venv "$SPRAWL_HOME/venv"
  "$SPRAWL_BIN" -m pip install --quiet -e ".$extras"
fi
"$SPRAWL_BIN" -m sprawl.cli --version
