#!/usr/bin/env bash
# A Ray cluster on machines that are reached by SSH. `cluster.sh --help` says how.
#
# On the other machines this same file runs, sent over SSH: the verbs that begin with an underscore are for that.
set -euo pipefail

readonly MARK=SHOAL_CLUSTER # in the environment of all that a cluster has started
GRACE_S=120
HEAD_AWAY_S=600             # how long machines wait for a head whose state Redis keeps
SSH_S=${SHOAL_SSH_S:-300}     # what is done on another machine takes no longer

usage() {
  cat <<'EOF'
Usage: cluster.sh VERB [OPTIONS] [HOST...] [-- OPTIONS OF ray start]

  start-head       start the head of a cluster on this machine; the same again after the head has died
  join HOST...     start Ray on other machines, by SSH, and have them join
  leave HOST...    have runs save and leave these machines, then stop Ray there and remove what join made
  status           machines, ports and firewall; status 1 if something is missing
  stop             have jobs and runs save, then stop all machines and the head
  cleanup          stop, and remove all that this script has made

start-head
  --address IP | --interface NAME   where the cluster is reached; needed where there is more than one
  --port N              first of nine ports in a row (6379)
  --dashboard-port N    dashboard and jobs (8265)
  --client-port N       ray:// clients (10001)
  --worker-ports A-B    one for each of Ray's workers on a machine (20000-20999)
  --num-cpus N          CPUs of the head that may train (0)
  --redis HOST:PORT     keep the cluster's state there, so that runs survive the head; its password is read from
                        SHOAL_REDIS_PASSWORD or --redis-password-file FILE
  --temp-dir DIR        where Ray's files go, on every machine (/tmp)
join, leave, stop, cleanup
  --hosts-file FILE     more hosts, one a line
  --user NAME           whom to be there
  --ssh COMMAND         instead of "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5"
  --venv DIR            the environment whose ray is used (there: the same path as here)
  --job-drivers         join: jobs of `shoal submit` are led from these machines, not from the head
  --grace S             leave, stop, cleanup: seconds for runs to save (120)
  --token               leave, cleanup: remove the token too, where this script has made it
  --force               cleanup: forget machines, and a Redis, that cannot be reached
everywhere
  --state DIR           what this script remembers of the cluster (~/.ray/shoal-cluster)
  --no-firewall         add no rules. Ray listens on all interfaces with most of its ports

Examples
  cluster.sh start-head --interface eth0
  cluster.sh join --user ubuntu --ssh "ssh -i key.pem" 10.0.0.11 10.0.0.12
  shoal submit digits --workers 2 --address http://10.0.0.10:8265
  cluster.sh leave 10.0.0.12
  cluster.sh cleanup
EOF
}

die() { printf 'error: %s\n' "$*" >&2 && exit 2; }   # wrong input
fail() { printf 'error: %s\n' "$*" >&2 && exit 1; }  # what was tried failed

# ---------------------------------------------------------------- what is remembered: lines of "name value"

setting() { sed -n "s/^$2 //p" "$1" 2>/dev/null | head -n 1; }

remember() { # FILE NAME VALUE
  local kept
  kept=$({ [[ -f $1 ]] && grep -v "^$2 " "$1"; } || true)
  (umask 077 && printf '%s\n' "${kept:+$kept$'\n'}$2 $3" >"$1.new" && mv "$1.new" "$1")
}

own_folder() { # make a folder that is ours alone, or refuse one that is not
  (umask 077 && mkdir -p "$1") 2>/dev/null || fail "$1: cannot be made; say another place with --temp-dir or --state"
  [[ -O $1 && ! -L $1 ]] || fail "$1: belongs to somebody else; say another place with --temp-dir or --state"
  chmod 700 "$1"
}

# One at a time may change a cluster. What is started to stay must not hold this: 9>&-.
lock() {
  [[ -w $STATE ]] || fail "$STATE: cannot be written to; whose cluster is it?"
  exec 9>"$STATE/lock"
  flock -n 9 && [[ $STATE/lock -ef /dev/fd/9 ]] || # cleanup removes the file
    fail "another cluster.sh is at work on the cluster in $STATE, or what it has begun on other machines; again when" \
      "that has ended"
}

lock_here() { # on another machine: a join whose connection broke goes on, and who comes next waits for its end
  LOCK="$HOME/.ray/$ID-$HOSTNAME.lock"
  (umask 077 && mkdir -p "$HOME/.ray")
  exec 9>"$LOCK"
  flock -w "$SSH_S" 9 || fail "another cluster.sh has been at work on $HOSTNAME for $SSH_S s"
}

# ---------------------------------------------------------------- the network

addresses() { ip -o -4 addr show up scope global 2>/dev/null | awk '{ sub("/.*", "", $4); print $2, $4 }'; }

interface_of() { addresses | awk -v address="$1" '$2 == address { print $1; exit }'; }

choose_address() { # ADDRESS INTERFACE: the one that is meant, or the only one
  local found candidates
  candidates=$(addresses)
  if [[ -n $1 ]]; then
    found=$(awk -v address="$1" '$2 == address { print $2 }' <<<"$candidates")
    [[ -n $found ]] || die "--address: '$1' is no address of this machine that others reach; it has:" "${candidates//$'\n'/, }"
  elif [[ -n $2 ]]; then
    found=$(awk -v name="$2" '$1 == name { print $2; exit }' <<<"$candidates")
    [[ -n $found ]] || die "--interface: '$2' is no interface here with an IPv4 address; there are:" "${candidates//$'\n'/, }"
  else
    found=$(awk '{ print $2 }' <<<"$candidates")
    [[ -n $found ]] || fail "this machine has no IPv4 address but its loopback's"
    (($(wc -l <<<"$found") == 1)) || die "--address: is missing, and this machine has more than one:" "${candidates//$'\n'/, }"
  fi
  printf '%s\n' "$found"
}

# Ports of every machine are PORT to PORT+6, of the head PORT+7 and PORT+8 too; the last three tell metrics to anybody.
fixed_ports() { # the ports that start-head or join must find free
  if [[ $ROLE == head ]]; then
    seq "$PORT" $((PORT + 8))
    printf '%s\n' "$DASHBOARD_PORT" "$CLIENT_PORT"
  else
    seq $((PORT + 1)) $((PORT + 6))
  fi
}

check_ports() {
  local port taken
  taken=$(ss -Hltn | awk '{ sub(".*:", "", $4); print $4 }')
  for port in $(fixed_ports); do
    ! grep -qx "$port" <<<"$taken" || fail "port $port of $HOSTNAME is taken; use others with --port, --dashboard-port" \
      "and --client-port, or stop what has it (ss -ltnp 'sport = :$port' tells)"
  done
}

as_root() {
  if ((EUID == 0)); then "$@"; else sudo -n "$@"; fi
}

firewall_tool() {
  local tool
  for tool in nft iptables; do
    if command -v "$tool" >/dev/null; then
      if [[ $tool == nft ]]; then as_root nft list tables; else as_root iptables -S INPUT; fi &>/dev/null &&
        printf '%s\n' "$tool" && return
    fi
  done
}

# Ray can bind its own ports to an address only in part, so what comes to them another way is refused here. The ports of
# metrics, which ask for no token, answer this machine and the head alone.
open_firewall() {
  local name="shoal_$ID" metrics=$((PORT + 6))-$((PORT + 8)) tool
  tool=$(firewall_tool)
  close_firewall
  case $tool in
    nft)
      as_root nft -f - <<EOF
table inet $name {
  chain input {
    type filter hook input priority filter - 5; policy accept;
    iifname "lo" accept
    iifname "$INTERFACE" ip daddr $ADDRESS ip saddr $HEAD tcp dport $metrics accept
    tcp dport $metrics reject with tcp reset
    iifname "$INTERFACE" ip daddr $ADDRESS accept
    tcp dport { $PORT-$((PORT + 8)), $DASHBOARD_PORT, $CLIENT_PORT, $WORKER_PORTS } reject with tcp reset
  }
}
EOF
      ;;
    iptables)
      by_iptables iptables "$name" && { [[ ! -e /proc/net/if_inet6 ]] || by_iptables ip6tables "$name"; }
      ;;
    *) return 1 ;;
  esac
}

by_iptables() { # iptables|ip6tables CHAIN: by IPv6 nobody has a business with these ports
  local rule=(as_root "$1" -w -A "$2") ports=(-p tcp -m multiport --dports) metrics=$((PORT + 6)):$((PORT + 8))
  local reject=(-j REJECT --reject-with tcp-reset)
  as_root "$1" -w -N "$2" && "${rule[@]}" -i lo -j RETURN || return 1
  if [[ $1 == iptables ]]; then
    "${rule[@]}" "${ports[@]}" "$metrics" -i "$INTERFACE" -d "$ADDRESS" -s "$HEAD" -j RETURN &&
      "${rule[@]}" "${ports[@]}" "$metrics" "${reject[@]}" &&
      "${rule[@]}" -i "$INTERFACE" -d "$ADDRESS" -j RETURN || return 1
  fi
  "${rule[@]}" "${ports[@]}" "$PORT:$((PORT + 8)),$DASHBOARD_PORT,$CLIENT_PORT,${WORKER_PORTS/-/:}" "${reject[@]}" &&
    as_root "$1" -w -I INPUT -j "$2"
}

close_firewall() {
  local name="shoal_$ID" family
  if command -v nft >/dev/null; then as_root nft delete table inet "$name" &>/dev/null || true; fi
  for family in iptables ip6tables; do
    command -v "$family" >/dev/null || continue
    while as_root "$family" -w -D INPUT -j "$name" &>/dev/null; do :; done
    as_root "$family" -w -F "$name" &>/dev/null || true
    as_root "$family" -w -X "$name" &>/dev/null || true
  done
}

has_firewall() {
  { command -v nft >/dev/null && as_root nft list table inet "shoal_$ID"; } &>/dev/null ||
    { command -v iptables >/dev/null && as_root iptables -S "shoal_$ID"; } &>/dev/null
}

other_addresses() {
  { addresses && ip -o -6 addr show up scope global 2>/dev/null | awk '{ sub("/.*", "", $4); print $2, $4 }'; } |
    awk -v address="$ADDRESS" '$2 != address { print $1 " (" $2 ")" }' | paste -sd, -
}

protect() { # rules where they can be added; where not, only a machine whose sole address is the cluster's will do
  ((FIREWALL)) || return 0
  if open_firewall; then return 0; fi
  close_firewall
  local others
  others=$(other_addresses)
  [[ -z $others ]] || fail "Ray's ports would be open on $others of $HOSTNAME too, and no firewall rule can be added:" \
    "be root, or have sudo and nft or iptables there; or close ports $PORT-$((PORT + 8)) and $WORKER_PORTS yourself" \
    "and say --no-firewall"
}

# ---------------------------------------------------------------- processes

# By MARK or, as Ray's longest titles overwrite it, by the folder that they work in; but not the shell of one who looks.
ours() { # those of this cluster on this machine
  local link
  {
    grep -lazxs "$MARK=$ID" /proc/[0-9]*/environ | cut -d/ -f3 || true
    while read -r link; do
      [[ $(readlink "${link%cwd}fd/0") == /dev/pts/* ]] || cut -d/ -f3 <<<"$link"
    done < <(find /proc -mindepth 2 -maxdepth 2 -name cwd \( -lname "$TEMP" -o -lname "${TEMP}[ /]*" \))
  } 2>/dev/null | sort -un
}

check_identity() { # what is looked for, killed and removed by these must not be empty
  [[ $ID =~ ^[0-9a-f]{8}$ && $TEMP =~ ^/[A-Za-z0-9/._-]*/shoal-ray-$ID$ ]] ||
    fail "--state: $STATE/settings is damaged: it names no cluster; stop Ray by hand, and remove it"
}

is_running() { # NAME: one of Ray's own programs
  local pid program
  for pid in $(ours); do
    { IFS= read -r -d '' program <"/proc/$pid/cmdline"; } 2>/dev/null || continue
    if [[ ${program##*/} == "$1" ]]; then return 0; fi
  done
  return 1
}

stop_ours() { # ask, wait, kill
  local pids pid waited=0
  pids=$(ours)
  for pid in $pids; do kill -TERM "$pid" 2>/dev/null || true; done
  while [[ -n $(ours) ]] && ((waited++ < 50)); do sleep 0.2; done
  for waited in 1 2 3 4 5; do # what somebody starts while it is being killed comes in the next round
    pids=$(ours)
    [[ -n $pids ]] || return 0
    for pid in $pids; do kill -KILL "$pid" 2>/dev/null || true; done
    sleep 0.2
  done
  fail "processes $(ours | paste -sd' ' -) of $HOSTNAME do not end"
}

# ---------------------------------------------------------------- one machine

choose_environment() { # the environment of --venv, or that of the ray on the path
  if [[ -z $VENV ]]; then
    local ray
    ray=$(command -v ray) || die "--venv: is missing, and no ray is on the path: activate the environment, or name it"
    VENV=$(dirname "$(dirname "$ray")")
  fi
  [[ -x $VENV/bin/python && -x $VENV/bin/ray ]] ||
    fail "$VENV of $HOSTNAME holds no Ray; install there what the head has, or name its environment with --venv"
  VENV=$(cd "$VENV" && pwd)
}

versions() {
  "$VENV/bin/python" - <<'EOF'
import importlib.metadata as installed, platform
print("Python", platform.python_version(), end="")
for name in ("ray", "shoal"):
    try:
        print(f", {name} {installed.version(name)}", end="")
    except installed.PackageNotFoundError:
        print(f", no {name}", end="")
EOF
}

token_file() { printf '%s\n' "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}"; }

# Beside it, who has made it: a machine, of which another may have the same home; a cluster, of which there may be more;
# and which token it was, since its user may have put another there.
token_mark() { printf '%s.made-by-cluster.sh\n' "$(token_file)"; }

mark_of_token() { # FOLDER OF THE CLUSTER
  printf '%s %s %s\n' "$HOSTNAME" "$(sha256sum <"$(token_file)" | cut -c 1-64)" "$1"
}

make_token() { # TOKEN
  (umask 077 && mkdir -p "$(dirname "$(token_file)")" && printf '%s' "$1" >"$(token_file)")
  mark_token
  MADE_TOKEN=1
}

mark_token() { (umask 077 && mark_of_token "$TEMP" >"$(token_mark)"); }

inherit_token() { # what a cluster has made that is gone is ours
  local folder
  folder=$(cut -d' ' -f3 "$(token_mark)" 2>/dev/null) || return 0
  if [[ -n $folder && ! -d $folder && $(<"$(token_mark)") == "$(mark_of_token "$folder")" ]]; then mark_token; fi
}

remove_token() { # or say why not
  if [[ -e $(token_file) && $(cat "$(token_mark)" 2>/dev/null) == "$(mark_of_token "$TEMP")" ]]; then
    rm -f "$(token_file)" "$(token_mark)"
  elif [[ -e $(token_file) ]]; then
    printf '%s\n' "$(token_file) was there before, and stays: remove it yourself to have a new token made"
  fi
}

run_ray() { # ray start, found by MARK, in a folder whose files hide none of Python's modules
  local start=("$VENV/bin/ray" start) options log="$TEMP/start.log"
  local environment=("$MARK=$ID" "TMPDIR=$TEMP" "PATH=$VENV/bin:$PATH" RAY_AUTH_MODE=token "RAY_AUTH_TOKEN_PATH=$(token_file)"
    "AUTOSCALER_METRIC_PORT=$((PORT + 7))" "DASHBOARD_METRIC_PORT=$((PORT + 8))")
  if [[ $REDIS != none ]]; then
    environment+=("RAY_gcs_rpc_server_reconnect_timeout_s=$HEAD_AWAY_S")
    if [[ $ROLE == head ]]; then
      environment+=("RAY_REDIS_ADDRESS=$REDIS" "RAY_external_storage_namespace=$ID")
      [[ -z ${SHOAL_REDIS_PASSWORD:-} ]] || start=("$VENV/bin/python" -m shoal.deploy.head)
    fi
  fi
  if [[ $ROLE == head ]]; then
    options=(--head --port "$PORT" --dashboard-host "$ADDRESS" --dashboard-port "$DASHBOARD_PORT"
      --ray-client-server-port "$CLIENT_PORT" --num-cpus "$NUM_CPUS")
  else
    options=(--address "$HEAD:$PORT")
    ((!JOB_DRIVERS)) || options+=(--resources '{"drivers": 1000}')
  fi
  options+=(--node-ip-address "$ADDRESS" --temp-dir "$TEMP/ray" --disable-usage-stats
    --node-manager-port $((PORT + 1)) --object-manager-port $((PORT + 2)) --runtime-env-agent-port $((PORT + 3))
    --dashboard-agent-listen-port $((PORT + 4)) --dashboard-agent-grpc-port $((PORT + 5))
    --metrics-export-port $((PORT + 6))
    --min-worker-port "${WORKER_PORTS%-*}" --max-worker-port "${WORKER_PORTS#*-}")
  # The others of this machine's variables are for whoever calls us: what Ray starts would act on them.
  (cd "$TEMP" && env -u RAY_ADDRESS -u RAY_AUTH_TOKEN -u RAY_TMPDIR "${environment[@]}" \
    "${start[@]}" "${options[@]}" "${RAY_OPTIONS[@]}") </dev/null &>"$log" 9>&- ||
    fail "Ray does not start on $HOSTNAME: $(why "$log")$([[ $ROLE != head ]] || printf ' (see %s)' "$STATE/start.log")"
}

why() { # LOG: its last line that tells of an error, or its last
  { grep -E 'Error|error:|Exception' "$1" || grep . "$1" || printf 'it says nothing\n'; } | tail -n 1 | cut -c 1-300
}

# Whatever ends a start before its end, Ctrl-C too, takes back what it has done.
begin() { # IS_NEW
  IS_NEW=$1 MADE_TOKEN=0
  trap 'printf "error: interrupted\n" >&2 && exit 130' INT TERM HUP
  trap undo EXIT
}

# shellcheck disable=SC2329 # by trap
undo() {
  local status=$?
  trap '' INT TERM HUP
  stop_ours
  close_firewall
  if [[ $ROLE == head && -f $TEMP/start.log ]]; then cp "$TEMP/start.log" "$STATE/start.log"; fi
  if ((IS_NEW)); then
    if [[ -O $TEMP && ! -L $TEMP ]]; then rm -rf "$TEMP"; fi
    if ((MADE_TOKEN)); then rm -f "$(token_file)" "$(token_mark)"; fi
    if [[ $ROLE == head ]]; then rm -f "$STATE/settings" "$STATE/lock" && rmdir "$STATE" 2>/dev/null || true; fi
    if [[ $ROLE == worker ]]; then rm -f "$LOCK" && printf 'undone\n'; fi
  fi
  exit "$status"
}

end() { trap - EXIT INT TERM HUP; }

# Ray opens its own folder to everybody, so that lies in one which is closed.
start_node() { # what start-head and join have in common; everything is known by now
  own_folder "$TEMP"
  INTERFACE=$(interface_of "$ADDRESS")
  [[ -n $INTERFACE ]] || fail "$ADDRESS is no address of $HOSTNAME"
  if [[ -n $(ours) ]]; then stop_ours; fi # what is left of a life before
  check_ports
  protect
  run_ray
}

remove_node() { # REMOVE_TOKEN
  stop_ours
  close_firewall
  local kept=''
  if (($1)); then kept=$(remove_token); fi
  if [[ -O $TEMP && ! -L $TEMP ]]; then rm -rf "$TEMP"; fi
  rm -f "$LOCK"
  printf 'ok - stopped, and removed what join made%s\n' "${kept:+; $kept}"
}

remote_join() { # on the machine that joins; the token comes on stdin
  local token route file note=''
  IFS= read -r token
  ROLE=worker
  choose_environment
  [[ $(versions) == "$VERSIONS" ]] || fail "$HOSTNAME has $(versions), and the head $VERSIONS; install the same"
  route=$(ip -o -4 route get "$HEAD" 2>/dev/null) || fail "$HOSTNAME has no way to $HEAD"
  [[ $route != local* ]] || fail "$HOSTNAME is the head itself"
  ADDRESS=$(sed -n 's/.* src \([0-9.]*\).*/\1/p' <<<"$route")
  timeout 5 bash -c ": </dev/tcp/$HEAD/$PORT" 2>/dev/null ||
    fail "$HOSTNAME does not reach $HEAD:$PORT; is a firewall between them, or the head not running?"
  if is_running raylet && [[ ",$ALIVE," == *",$ADDRESS,"* ]]; then printf 'ok %s had joined before\n' "$ADDRESS" && return; fi
  file=$(token_file)
  [[ ! -s $file || $(<"$file") == "$token" ]] ||
    fail "$HOSTNAME has the token of another cluster in $file; remove it if that one is gone"
  printf 'begun\n'
  if [[ -d $TEMP ]]; then begin 0; else begin 1; fi
  if [[ ! -s $file ]]; then make_token "$token"; else inherit_token; fi
  own_folder "$TEMP"
  chmod 600 "$file"
  start_node
  end
  if ((FIREWALL)) && ! has_firewall; then note='; NO firewall rules could be added there'; fi
  printf 'ok %s joined%s\n' "$ADDRESS" "$note"
}

# ---------------------------------------------------------------- the cluster, from its head

load_to_change() {
  if [[ -f $STATE/settings ]]; then lock; fi
  load
}

load() { # what start-head has remembered
  local file="$STATE/settings"
  [[ -f $file ]] || die "--state: there is no cluster in $STATE; start one with cluster.sh start-head"
  ID=$(setting "$file" id) HEAD=$(setting "$file" address) PORT=$(setting "$file" port)
  DASHBOARD_PORT=$(setting "$file" dashboard_port) CLIENT_PORT=$(setting "$file" client_port)
  WORKER_PORTS=$(setting "$file" worker_ports) TEMP=$(setting "$file" temp) REDIS=$(setting "$file" redis)
  HEAD_VENV=$(setting "$file" venv)
  ADDRESS=$HEAD
  check_identity
}

ask_ray() { # nodes.py, with the head's environment and token
  env -u RAY_AUTH_TOKEN RAY_AUTH_MODE=token "RAY_AUTH_TOKEN_PATH=$(token_file)" \
    "$HEAD_VENV/bin/python" -m shoal.deploy.nodes "$@" </dev/null
}

start_head() {
  local file="$STATE/settings" token before
  ROLE='head'
  ADDRESS=$(choose_address "$ADDRESS" "$INTERFACE")
  HEAD=$ADDRESS
  choose_environment
  [[ -z ${RAY_AUTH_TOKEN:-} ]] || die "RAY_AUTH_TOKEN: is set, and processes that run on would not have it; unset it," \
    "and put the token into $(token_file)"
  [[ $REDIS == none ]] || timeout 5 bash -c ": </dev/tcp/${REDIS%:*}/${REDIS##*:}" 2>/dev/null ||
    fail "--redis: nothing answers at $REDIS; is it running, and does it listen on this network?"
  own_folder "$STATE"
  lock
  if [[ -f $file ]]; then
    before="$(setting "$file" address):$(setting "$file" port)"
    [[ $before == "$ADDRESS:$PORT" ]] || die "--state: $STATE is of the cluster at $before; cleanup that one first, or" \
      "say another folder"
    [[ $(setting "$file" redis) == "$REDIS" ]] || die "--redis: this cluster keeps its state in" \
      "'$(setting "$file" redis)'; say the same, or cleanup first"
    ID=$(setting "$file" id) TEMP=$(setting "$file" temp)
    check_identity
    if is_running gcs_server && is_running raylet; then fail "the head runs: cluster.sh status tells, stop ends it"; fi
  else
    ID=$(od -An -tx1 -N4 /dev/urandom | tr -d ' \n')
    TEMP="${TEMP_BASE%/}/shoal-ray-$ID"
  fi
  if [[ -f $file ]]; then begin 0; else begin 1; fi
  token=$(token_file)
  if [[ -s $token ]]; then inherit_token; else make_token "$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')"; fi
  chmod 600 "$token"
  remember "$file" id "$ID"
  remember "$file" address "$ADDRESS"
  remember "$file" port "$PORT"
  remember "$file" dashboard_port "$DASHBOARD_PORT"
  remember "$file" client_port "$CLIENT_PORT"
  remember "$file" worker_ports "$WORKER_PORTS"
  remember "$file" temp "$TEMP"
  remember "$file" redis "$REDIS"
  remember "$file" venv "$VENV"
  start_node
  remember "$file" firewall "$(if has_firewall; then printf 'yes\n'; else printf 'no\n'; fi)"
  end
  printf 'head: %s:%s\n' "$ADDRESS" "$PORT"
  printf 'dashboard and jobs: http://%s:%s, with the token in %s\n' "$ADDRESS" "$DASHBOARD_PORT" "$token"
  tell_firewall
}

tell_firewall() {
  if has_firewall; then
    printf 'firewall: reached by %s alone; metrics, which ask for no token, from the head alone\n' "$ADDRESS"
  else
    printf 'firewall: NONE: ports %s-%s and %s answer on every interface (%s), and %s-%s tell metrics without a token\n' \
      "$PORT" $((PORT + 8)) "$WORKER_PORTS" "$(addresses | awk '{ print $1 }' | sort -u | paste -sd, -)" \
      $((PORT + 6)) $((PORT + 8))
  fi
}

quoted() { printf '%q ' "$@"; }

on() { # HOST VERB ARGUMENTS: run this script there
  local host=$1 target="${SSH_USER:+$SSH_USER@}$1"
  shift
  # shellcheck disable=SC2086 # a command of several words
  { cat "$SELF" && printf '%s\n' "$TOKEN"; } |
    timeout --foreground "$SSH_S" $SSH_COMMAND "$target" "bash -s -- $(quoted "$@")" 9>&-
}

on_all() { # VERB HOST...: at once, with a line for each; those that failed are in FAILED
  local verb=$1 folder host line arguments status
  shift
  folder=$(mktemp -d)
  # Of a machine whose answer was not heard, nobody knows how it stands: it stays among the joined.
  # shellcheck disable=SC2064 # this folder
  trap "rm -rf $(quoted "$folder"); printf 'error: interrupted: %s may go on with it for up to $SSH_S s, and belong to the cluster until leave or cleanup\n' '$*' >&2; exit 130" INT TERM HUP
  arguments=(--id "$ID" --head "$HEAD" --port "$PORT" --dashboard-port "$DASHBOARD_PORT" --client-port "$CLIENT_PORT"
    --worker-ports "$WORKER_PORTS" --temp "$TEMP" --redis "$REDIS" --venv "${VENV:-$HEAD_VENV}" --versions "$VERSIONS"
    --alive "$ALIVE")
  ((FIREWALL)) || arguments+=(--no-firewall)
  ((!JOB_DRIVERS)) || arguments+=(--job-drivers)
  ((!REMOVE_TOKEN)) || arguments+=(--token)
  ((!${#RAY_OPTIONS[@]})) || arguments+=(-- "${RAY_OPTIONS[@]}")
  for host in "$@"; do
    (status=0 && on "$host" "$verb" "${arguments[@]}" >"$folder/$host.out" 2>"$folder/$host.err" || status=$?
      printf '%s\n' "$status" >"$folder/$host.status") 2>/dev/null &
  done
  wait
  FAILED=()
  printf '%-24s %-16s %s\n' host address result
  for host in "$@"; do
    read -r status <"$folder/$host.status" || status=1
    if ((!status)) && line=$(grep '^ok ' "$folder/$host.out"); then
      read -r _ address line <<<"$line"
      printf '%-24s %-16s %s\n' "$host" "$address" "$line"
      keep_host "$verb" "$host" "$address"
    else
      line=$(grep . "$folder/$host.err" | tail -n 1 || true)
      ((status != 124)) || line="no answer for $SSH_S s"
      printf '%-24s %-16s FAILED: %s\n' "$host" - "${line:-no answer}"
      FAILED+=("$host")
      if [[ $(address_of "$host") == - ]] && { grep -qx undone "$folder/$host.out" ||
        { [[ " ${ADDED[*]} " == *" $host "* ]] && ! grep -qx begun "$folder/$host.out"; }; }; then
        keep_host _leave "$host" - # it has nothing of the cluster's
      fi
    fi
  done
  rm -rf "$folder"
  trap - INT TERM HUP
}

keep_host() { # VERB HOST ADDRESS: who is part of the cluster
  local others
  [[ $1 != _stop ]] || return 0
  others=$(awk -v host="$2" '$1 != host' "$STATE/hosts" 2>/dev/null || true)
  if [[ $1 == _join ]]; then others+="${others:+$'\n'}$2 $3"; fi
  (umask 077 && printf '%s' "${others:+$others$'\n'}" >"$STATE/hosts")
}

joined() { cut -d' ' -f1 "$STATE/hosts" 2>/dev/null || true; }

address_of() { awk -v host="$1" '$1 == host { print $2 }' "$STATE/hosts" 2>/dev/null || true; }

join_hosts() {
  local host
  load_to_change
  ((${#HOSTS[@]})) || die "HOST: is missing; name machines, or --hosts-file"
  is_running raylet || fail "the head does not run; start it with cluster.sh start-head"
  TOKEN=$(<"$(token_file)")
  VERSIONS=$(VENV=$HEAD_VENV versions)
  ALIVE=$(ask_ray list "$HEAD:$PORT" | awk '$2 == "alive" { print $1 }' | paste -sd, -)
  for host in "${HOSTS[@]}"; do # before it is asked: an answer may not be heard
    if [[ -z $(address_of "$host") ]]; then keep_host _join "$host" - && ADDED+=("$host"); fi
  done
  on_all _join "${HOSTS[@]}"
  ((!${#FAILED[@]})) || exit 1
}

drain() { # HOST...: have runs save and leave
  local host hosts=()
  for host in "$@"; do
    if [[ $(address_of "$host") != - ]]; then hosts+=("$(address_of "$host")"); fi
  done
  ((!${#hosts[@]})) || ask_ray drain "$HEAD:$PORT" "${hosts[@]}" --grace "$GRACE_S" || true
}

leave_hosts() {
  local host all
  load_to_change
  all=$(joined | paste -sd" " -)
  ((${#HOSTS[@]})) || die "HOST: is missing; joined are: ${all:-none}"
  for host in "${HOSTS[@]}"; do
    [[ -n $(address_of "$host") ]] || die "HOST: '$host' has not joined; joined are: ${all:-none}"
  done
  if is_running gcs_server; then drain "${HOSTS[@]}"; fi
  on_all _leave "${HOSTS[@]}"
  ((!${#FAILED[@]})) || exit 1
}

stop_cluster() {
  local hosts
  mapfile -t hosts < <(joined)
  if is_running gcs_server && is_running raylet; then
    ask_ray stop-jobs "http://$HEAD:$DASHBOARD_PORT" --grace "$GRACE_S" || true
    drain "${hosts[@]}"
  fi
  FAILED=()
  ((!${#hosts[@]})) || on_all "$1" "${hosts[@]}"
  stop_ours
  close_firewall
  printf 'head: stopped\n'
}

stop() {
  load_to_change
  stop_cluster _stop
  ((!${#FAILED[@]})) || exit 1
}

cleanup() {
  load_to_change
  stop_cluster _leave
  forget_in_redis || FAILED+=("Redis")
  if ((${#FAILED[@]} && !FORCE)); then
    fail "${FAILED[*]}: not cleaned up; again when they can be reached, or --force to forget them"
  fi
  if ((REMOVE_TOKEN)); then remove_token; fi
  if [[ -O $TEMP && ! -L $TEMP ]]; then rm -rf "$TEMP"; fi
  rm -f "$STATE"/{settings,hosts,start.log,redis.log,lock}
  rmdir "$STATE"
}

forget_in_redis() { # what Ray has kept there under this cluster's name
  [[ $REDIS != none ]] || return 0
  SHOAL_REDIS_PASSWORD="${SHOAL_REDIS_PASSWORD:-}" "$HEAD_VENV/bin/python" - "$REDIS" "$ID" &>"$STATE/redis.log" <<'EOF' ||
import os, sys
from ray._private.gcs_utils import cleanup_redis_storage
host, _, port = sys.argv[1].rpartition(":")
cleanup_redis_storage(host, int(port), os.environ["SHOAL_REDIS_PASSWORD"], False, sys.argv[2])
EOF
    {
      printf 'warning: what Ray has kept in Redis under RAY%s is still there: %s\n' "$ID" "$(why "$STATE/redis.log")" >&2
      [[ -n ${SHOAL_REDIS_PASSWORD:-} ]] || printf 'warning: SHOAL_REDIS_PASSWORD is not set\n' >&2
      return 1
    }
}

status() {
  local is_whole=1 host address nodes state
  load
  nodes=$(ask_ray list "$HEAD:$PORT" 2>/dev/null) || true
  if grep -q "^$HEAD alive" <<<"$nodes" && is_running raylet; then state=running; else state=DOWN is_whole=0; fi
  printf 'head                     %-16s %s\n' "$HEAD" "$state"
  while read -r host address; do
    if grep -q "^$address alive" <<<"$nodes"; then state=running; else state=DOWN is_whole=0; fi
    if [[ $address == - ]]; then state='UNKNOWN: join was cut off; join it again, or leave'; fi
    printf '%-24s %-16s %s\n' "$host" "$address" "$state"
  done < <(cat "$STATE/hosts" 2>/dev/null)
  printf 'ports of the head:'
  ss -Hltn | awk -v first="$PORT" -v d="$DASHBOARD_PORT" -v c="$CLIENT_PORT" '{ port = $4; sub(".*:", "", port)
    if ((port >= first && port <= first + 8) || port == d || port == c) { printf " %s", $4; found = 1 } } END { print found ? "" : " none is open" }'
  tell_firewall
  if [[ $(setting "$STATE/settings" firewall) == yes ]] && ! has_firewall; then is_whole=0; fi
  ((is_whole)) || exit 1
}

# ---------------------------------------------------------------- the command line

number() { # OPTION VALUE LOWEST HIGHEST
  if [[ ! $2 =~ ^(0|[1-9][0-9]{0,5})$ ]] || (($2 < $3 || $2 > $4)); then
    die "$1: '$2' should be a whole number from $3 to $4"
  fi
}

check_options() {
  number --port "$PORT" 1024 65527
  number --dashboard-port "$DASHBOARD_PORT" 1 65535
  number --client-port "$CLIENT_PORT" 1 65535
  number --num-cpus "$NUM_CPUS" 0 100000
  number --grace "$GRACE_S" 0 86400
  if [[ ! $WORKER_PORTS =~ ^([1-9][0-9]{3,4})-([1-9][0-9]{3,4})$ ]] ||
    ((BASH_REMATCH[1] >= BASH_REMATCH[2] || BASH_REMATCH[2] > 65535)); then
    die "--worker-ports: '$WORKER_PORTS' should be two ports, as in 20000-20999"
  fi
  local port
  for port in "$DASHBOARD_PORT" "$CLIENT_PORT"; do
    ((port < PORT || port > PORT + 8)) || die "--port: $PORT to $((PORT + 8)) are taken, so $port cannot be another's"
  done
  ((DASHBOARD_PORT != CLIENT_PORT)) || die "--client-port: $CLIENT_PORT is the dashboard's"
  [[ -z $ADDRESS || -z $INTERFACE ]] || die "--interface: say either this or --address"
  [[ $REDIS == none || $REDIS =~ ^[A-Za-z0-9._-]+:[0-9]+$ ]] || die "--redis: '$REDIS' should be HOST:PORT"
  [[ $TEMP_BASE =~ ^/[A-Za-z0-9._/-]{1,18}$ ]] ||
    die "--temp-dir: '$TEMP_BASE' should be a full path of less than 20 plain letters: Ray's sockets lie below it"
}

read_hosts() { # FILE
  [[ -r $1 && ! -d $1 ]] || die "--hosts-file: '$1' cannot be read"
  local host
  while read -r host _ || [[ -n $host ]]; do
    host=${host%$'\r'}
    if [[ -n $host && $host != \#* ]]; then add_host "$host"; fi
  done <"$1"
}

add_host() { # once
  [[ $1 =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || die "HOST: '$1' is no name of a machine"
  [[ " ${HOSTS[*]} " == *" $1 "* ]] || HOSTS+=("$1")
}

parse() {
  local name
  while (($#)); do
    case $1 in
      -h | --help) usage && exit 0 ;;
      --) shift && RAY_OPTIONS=("$@") && break ;;
      --no-firewall) FIREWALL=0 ;;
      --job-drivers) JOB_DRIVERS=1 ;;
      --token) REMOVE_TOKEN=1 ;;
      --force) FORCE=1 ;;
      --*)
        name=$1
        [[ " $WITH_VALUE " == *" $name "* ]] || die "$name: no such option (cluster.sh --help)"
        (($# > 1)) || die "$name: what it should be is missing (cluster.sh --help)"
        shift
        take "$name" "$1"
        ;;
      *) add_host "$1" ;;
    esac
    shift
  done
}

take() { # OPTION VALUE
  case $1 in
    --address) ADDRESS=$2 ;;
    --interface) INTERFACE=$2 ;;
    --port) PORT=$2 ;;
    --dashboard-port) DASHBOARD_PORT=$2 ;;
    --client-port) CLIENT_PORT=$2 ;;
    --worker-ports) WORKER_PORTS=$2 ;;
    --num-cpus) NUM_CPUS=$2 ;;
    --redis) REDIS=$2 ;;
    --redis-password-file)
      [[ -r $2 ]] || die "--redis-password-file: '$2' cannot be read"
      SHOAL_REDIS_PASSWORD=$(<"$2")
      ;;
    --temp-dir) TEMP_BASE=$2 ;;
    --hosts-file) read_hosts "$2" ;;
    --user)
      [[ $2 =~ ^[A-Za-z0-9_][A-Za-z0-9._@-]*$ ]] || die "--user: '$2' is no name of a user"
      SSH_USER=$2
      ;;
    --ssh) SSH_COMMAND=$2 ;;
    --venv)
      VENV=${2%/}
      [[ $VENV == /* ]] || VENV=$PWD/$VENV
      ;;
    --grace) GRACE_S=$2 ;;
    --state) STATE=$2 ;;
    --id) ID=$2 ;;
    --head) HEAD=$2 ;;
    --temp) TEMP=$2 ;;
    --versions) VERSIONS=$2 ;;
    --alive) ALIVE=$2 ;;
  esac
}

readonly WITH_VALUE="--address --interface --port --dashboard-port --client-port --worker-ports --num-cpus --redis \
--redis-password-file --temp-dir --hosts-file --user --ssh --venv --grace --state --id --head --temp --versions --alive"

main() {
  local verb=${1:-}
  : "${HOME:=$(getent passwd "$EUID" | cut -d: -f6)}" # services may have none
  export HOME
  PORT=6379 DASHBOARD_PORT=8265 CLIENT_PORT=10001 WORKER_PORTS=20000-20999 NUM_CPUS=0 REDIS=none TEMP_BASE=/tmp
  ADDRESS='' INTERFACE='' VENV='' HEAD='' ID='' TEMP='' VERSIONS='' ALIVE='' TOKEN='' SSH_USER='' ROLE=worker
  SSH_COMMAND='ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5' STATE="$HOME/.ray/shoal-cluster" SELF=${BASH_SOURCE[0]:-}
  FIREWALL=1 JOB_DRIVERS=0 REMOVE_TOKEN=0 FORCE=0 HOSTS=() ADDED=() RAY_OPTIONS=() FAILED=()
  (($#)) || die "VERB: is missing; it should be start-head, join, leave, status, stop or cleanup (cluster.sh --help)"
  if [[ $verb == -h || $verb == --help ]]; then usage && exit 0; fi
  shift
  parse "$@"
  check_options
  [[ ${#HOSTS[@]} == 0 || $verb == join || $verb == leave || $verb == _* ]] ||
    die "$verb: takes no HOST, and was given '${HOSTS[*]}'"
  local tool
  for tool in ip ss awk sed flock timeout sha256sum; do
    command -v "$tool" >/dev/null || fail "$HOSTNAME has no $tool; install it (ip and ss are in iproute2, flock in util-linux)"
  done
  case $verb in
    start-head) export SHOAL_REDIS_PASSWORD="${SHOAL_REDIS_PASSWORD:-}" && start_head ;;
    join) join_hosts ;;
    leave) leave_hosts ;;
    status) status ;;
    stop) stop ;;
    cleanup) cleanup ;;
    _*) check_identity && lock_here ;;&
    _join) remote_join ;;
    _stop) stop_ours && close_firewall && printf 'ok - stopped\n' ;;
    _leave) remove_node "$REMOVE_TOKEN" ;;
    *) die "VERB: '$verb' should be start-head, join, leave, status, stop or cleanup (cluster.sh --help)" ;;
  esac
}

main "$@"; exit # before what follows on stdin, where this file comes from there
