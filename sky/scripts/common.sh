# What the scripts here share; sourced, never run. After it: $SPRAWL_BIN is an interpreter that has Sprawl, secrets that
# came as text are files, and variables that were left empty are unset, because an empty AWS_ACCESS_KEY_ID or
# SPRAWL_REGION means something to the libraries that read it.
set -euo pipefail
umask 077
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SPRAWL_HOME="${SPRAWL_HOME:-$HOME/.sprawl}"
mkdir -p "$SPRAWL_HOME"

for name in AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_ENDPOINT_URL HF_TOKEN SPRAWL_TOKEN SPRAWL_MIRROR_TOKEN \
  SPRAWL_REGION SPRAWL_RUN_ID SPRAWL_ISLAND_ID; do
  [ -n "${!name:-}" ] || unset "$name"
done

if [ -n "${SPRAWL_SIGNING_KEY_TEXT:-}" ]; then
  printf '%s\n' "$SPRAWL_SIGNING_KEY_TEXT" >"$SPRAWL_HOME/signing.key"
  export SPRAWL_SIGNING_KEY="$SPRAWL_HOME/signing.key"
fi
if [ -n "${SPRAWL_TRUSTED_KEYS_TEXT:-}" ]; then
  printf '%s\n' "$SPRAWL_TRUSTED_KEYS_TEXT" >"$SPRAWL_HOME/trusted.pub"
  export SPRAWL_TRUSTED_KEYS="$SPRAWL_HOME/trusted.pub"
fi
unset SPRAWL_SIGNING_KEY_TEXT SPRAWL_TRUSTED_KEYS_TEXT

SPRAWL_BIN="${SPRAWL_PYTHON:-$SPRAWL_HOME/venv/bin/python}"
export PYTHONUNBUFFERED=1
