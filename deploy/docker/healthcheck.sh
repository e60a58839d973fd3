#!/bin/sh
# Docker's health check. A container that keeps a node of Ray (`ray start --block`) is asked as KubeRay asks it: its
# agent answers for the raylet and, on the head, for the GCS too. Any other has nothing to ask: a training that goes
# wrong ends, and its container with it. The agent's port, where it is not Ray's own: SHOAL_AGENT_PORT.
set -eu
case "$(tr '\0' ' ' </proc/1/cmdline)" in
  *"ray start "*) ;;
  *) exit 0 ;;
esac
exec wget --quiet --tries=1 --timeout=8 -O /dev/null "http://127.0.0.1:${SHOAL_AGENT_PORT:-52365}/api/healthz"
