#!/usr/bin/env bash
# One replica of a service: a sidecar that is not part of the run's fleet.
#
# Usage: bash sky/scripts/sidecar.sh      (`run:` of sky/serve.yaml)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

exec "$SPRAWL_BIN" -m sprawl.cli sidecar --board "$SPRAWL_BOARD" --run-id "${SPRAWL_RUN_ID:-latest}" \
  --host 0.0.0.0 --port "${SPRAWL_PORT:-8300}" ${SPRAWL_ENGINE:+--engine "$SPRAWL_ENGINE"} \
  ${SPRAWL_ENGINE_ARGS:+--engine-args "$SPRAWL_ENGINE_ARGS"} --cache "$SPRAWL_HOME/cache"
