#!/usr/bin/env bash
# Build the container, start it, and see that it serves and stops. Takes the program: docker or podman.
set -euo pipefail
cd "$(dirname "$0")/.."
runtime=${1:?docker or podman}
image=debubble-watch-check
name=debubble-watch-check-$$
folder=$(mktemp -d)
trap '"$runtime" rm --force "$name" > /dev/null 2>&1 || true; rm -rf "$folder"' EXIT
"$runtime" build --file deploy/Containerfile --tag "$image" .
head -c 32 /dev/urandom | base64 > "$folder/token"
cat > "$folder/watch.toml" << TOML
store = "sqlite:////var/lib/debubble/history.db"
lock = "/var/lib/debubble/watch.lock"
[listen]
address = "0.0.0.0:9464"
token_file = "/etc/debubble/token"
[[source]]
name = "training"
folder = "/traces"
TOML
mkdir "$folder/traces"
chmod 600 "$folder/token"  # one that everybody may read is refused
"$runtime" run --detach --name "$name" --publish 127.0.0.1::9464 \
  --user "$(id -u):$(id -g)" --tmpfs /var/lib/debubble:mode=1777 \
  --volume "$folder:/etc/debubble:ro" --volume "$folder/traces:/traces:ro" "$image"
address=$("$runtime" port "$name" 9464/tcp | head -n 1)
for _ in $(seq 60); do
  if curl --silent --fail --header "Authorization: Bearer $(cat "$folder/token")" \
    "http://$address/metrics" | grep -q '^debubble_'; then
    "$runtime" stop --time 30 "$name" > /dev/null
    code=$("$runtime" inspect --format '{{.State.ExitCode}}' "$name")
    test "$code" = 0 || { echo "it ended with $code"; exit 1; }
    echo "built, served metrics, stopped"
    exit 0
  fi
  sleep 1
done
"$runtime" logs "$name"
echo "no metrics within a minute"
exit 1
