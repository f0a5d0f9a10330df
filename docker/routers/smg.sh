#!/bin/sh
# smg (SGLang's model gateway, now Shepherd Model Gateway) in front of several minserve servers:
#
#     sh smg.sh http://127.0.0.1:8001 http://127.0.0.1:8002
#
# PORT (8000) and METRICS_PORT (29000) may be set.
#
# - A request goes to the server that its header x-session-id hashes to; without it, to any.
# - /ready is 503 while a server drains, loads or has lost its engine; /health is not.
# - No retries: they send a turn that its server refused (429: its queue is full) to another one,
#   where the session begins anew, and repeat a turn whose answer was lost.
# - Tokenizers stay with the servers: smg forwards texts.
exec smg launch --host 127.0.0.1 --port "${PORT:-8000}" --prometheus-port "${METRICS_PORT:-29000}" \
  --policy consistent_hashing --routing-key-headers x-session-id --worker-urls "$@" \
  --health-check-endpoint /ready --health-check-interval-secs 1 \
  --health-failure-threshold 1 --health-success-threshold 1 --worker-startup-check-interval 1 \
  --disable-retries --disable-tokenizer-autoload --request-timeout-secs 3600 --log-level warn
