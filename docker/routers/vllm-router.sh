#!/bin/sh
# vllm-router in front of several minserve servers:
#
#     sh vllm-router.sh http://127.0.0.1:8001 http://127.0.0.1:8002
#
# PORT (8000) and METRICS_PORT (29000) may be set.
#
# - /ready is 503 while a server drains, loads or has lost its engine; /health is not.
# - No retries: they go to the same server, and a turn whose answer was lost would be done twice.
# - At log level info each request's session, or its prompt, is written to the log.
exec vllm-router --host 127.0.0.1 --port "${PORT:-8000}" --prometheus-port "${METRICS_PORT:-29000}" \
  --policy consistent_hash --worker-urls "$@" \
  --health-check-endpoint /ready --health-check-interval-secs 1 \
  --health-failure-threshold 1 --health-success-threshold 1 --worker-startup-check-interval 1 \
  --disable-retries --request-timeout-secs 3600 --log-level warning
