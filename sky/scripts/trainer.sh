#!/usr/bin/env bash
# One node of the trainer: check the fabric, then start this node's trainer processes with torchrun.
#
# Usage: bash sky/scripts/trainer.sh      (`run:` of sky/trainer.yaml; reads SKYPILOT_NODE_IPS, SKYPILOT_NODE_RANK,
# SKYPILOT_NUM_NODES and the YAML's SPRAWL_ variables; outside SkyPilot it is a single node)
# Arguments, if any, are the command that drives the run in the place of `sprawl run`.
# Exit codes: 4 the fabric is TCP (SPRAWL_FABRIC=require), otherwise those of `sprawl run`.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

"$SPRAWL_BIN" -m infra.skypilot.trainer fabric
exec "$SPRAWL_BIN" -m infra.skypilot.trainer run "$@"
