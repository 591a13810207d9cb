# The machine's network, and the functions that scenarios use. For bash inside the machine:
#
#     rxe COMMAND...         run COMMAND beside the kernel's device: rxe0 on va, 10.0.0.1 and fd00:0:0:1::1
#     soft COMMAND...        run COMMAND beside the software device: namespace soft, on vb, 10.0.0.2 and fd00:0:0:1::2
#     serve_rxe COMMAND...   the same in the background, returning when COMMAND listens; its output is /tmp/server.out
#     serve_soft COMMAND...
#     pong_rxe COMMAND...    the same with a server on UDP port 7174, as udpong's
#     pong_soft COMMAND...
#     finish                 wait for that server to end; prints its output, returns its status
#     finish_rping           the same for librdmacm's rping, whose status is random when all went well
#     iwarp_network          make this network and another: siw0 on wa (10.0.1.1, fd00:0:0:2::1), and siw1 on wb
#                            (10.0.1.2, fd00:0:0:2::2) in the namespace iwarp
#     iwarp COMMAND...       run COMMAND in the namespace iwarp
#     network [MTU]          make this network, again if it has another MTU (default 1500)
#     impair NETEM...        from now on impair the packets of both directions; NETEM: arguments of tc-netem(8)
#     unimpaired             end the impairment
#     dropped                print the kernel's counters of lost packets

RXE4=10.0.0.1 SOFT4=10.0.0.2 RXE6=fd00:0:0:1::1 SOFT6=fd00:0:0:1::2
IWARP4=10.0.1.1 PEER4=10.0.1.2 IWARP6=fd00:0:0:2::1 PEER6=fd00:0:0:2::2
export PYTHONPATH=/project/src:/project/tests

# "sleep" without starting a program, which takes long on an emulated processor.
nap() { read -rt "$1" _ <>/run/nap; true; }

# Whether a process still runs. "kill -0" also succeeds for children that have ended, until bash reaps them, and after a
# "read" with a time limit bash 5.2 sometimes does not.
runs() {
    local found
    { read -r found </proc/"$1"/stat; } 2>/dev/null && [[ ${found##*) } != Z* ]]
}

network() {
    no_iwarp_network
    _rxe_network "$@"
}

_rxe_network() {
    local mtu=${1:-1500}
    [[ -e /sys/class/infiniband/rxe0 && -e /sys/class/net/va && $(</sys/class/net/va/mtu) = "$mtu" ]] && return
    local i
    for i in 1 2 3; do
        no_network
        _network "$mtu" && return
        echo "no network; the kernel's last messages:"
        dmesg | tail -n 5
    done
    return 1
}

_network() {
    local mtu=$1 i
    ip netns add soft
    ip link add va mtu "$mtu" type veth peer name vb mtu "$mtu" netns soft
    # As on a real link: single packets with their checksums. Only the other end of a veth pair takes anything else.
    ip netns exec soft ethtool -K vb tx off tx-udp-segmentation off >/dev/null
    ip address add "$RXE4/24" dev va
    ip address add "$RXE6/64" dev va nodad
    ip link set va up
    ip -n soft address add "$SOFT4/24" dev vb
    ip -n soft address add "$SOFT6/64" dev vb nodad
    ip -n soft link set vb up
    ip -n soft link set lo up
    if [ -e /sys/class/net/va/queues/rx-0/rps_cpus ]; then
        # Each end receives on one processor: packets sent on several would overtake each other.
        echo 1 >/sys/class/net/va/queues/rx-0/rps_cpus
        echo 1 | soft tee /sys/class/net/vb/queues/rx-0/rps_cpus >/dev/null
    fi
    rdma link add rxe0 type rxe netdev va
    for ((i = 0; i < 200; i++)); do
        grep -qs fd00:0000:0000:0001 /sys/class/infiniband/rxe0/ports/1/gids/[0-9] && break
        nap 0.05
    done
    ((i < 200)) || return
    # So that the first packets of a test do not wait for neighbour resolution.
    ping -q -c 1 -W 5 "$SOFT4" >/dev/null && ping -q -c 1 -W 5 "$SOFT6" >/dev/null
}

iwarp_network() {
    _rxe_network || return
    [ -e /sys/class/net/wa ] && return
    ip netns add iwarp
    ip link add wa type veth peer name wb netns iwarp
    ip address add "$IWARP4/24" dev wa
    ip address add "$IWARP6/64" dev wa nodad
    ip link set wa up
    ip -n iwarp address add "$PEER4/24" dev wb
    ip -n iwarp address add "$PEER6/64" dev wb nodad
    ip -n iwarp link set wb up
    ip -n iwarp link set lo up
    rdma link add siw0 type siw netdev wa && iwarp rdma link add siw1 type siw netdev wb || return
    ping -q -c 1 -W 5 "$PEER4" >/dev/null && ping -q -c 1 -W 5 "$PEER6" >/dev/null
}

no_iwarp_network() {
    [ -e /sys/class/net/wa ] || return 0
    rdma link delete siw1
    rdma link delete siw0
    ip link delete wa
    ip netns delete iwarp
    until ! [ -e /sys/class/net/wa ]; do nap 0.02; done
}

no_network() {
    rdma link delete rxe0 2>/dev/null
    ip link delete va 2>/dev/null
    ip netns delete soft 2>/dev/null
    until ! [ -e /sys/class/net/va ]; do nap 0.02; done
}

impair() {
    tc qdisc replace dev va root netem "$@"
    # Below tbf, which takes a train of packets apart: otherwise netem would drop or delay the train as a whole.
    soft tc qdisc replace dev vb root handle 1: tbf rate 10gbit burst 6000 limit 10000000
    soft tc qdisc replace dev vb parent 1: handle 2: netem "$@"
}

unimpaired() {
    tc qdisc delete dev va root
    soft tc qdisc delete dev vb root
}

sent() {
    cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts
}

# send_all COUNT LIBRARY ARGUMENTS: librdmacm's mckey, which leaves the group when rdma_rxe has sent COUNT packets, or
# has not within 30 s. LIBRARY is awaited_leave.c, compiled.
send_all() {
    local before
    before=$(sent)
    LD_PRELOAD=$2 mckey "${@:3}" < <(
        for ((i = 0; i < 3000; i++)); do
            (($(sent) - before < $1)) || exit
            nap 0.01
        done
        echo "rdma_rxe has not sent what mckey posted" >&2
    )
}

dropped() {
    grep . /proc/net/softnet_stat /sys/class/net/va/statistics/*dropped
    soft grep -E 'Udp6?(InErrors|RcvbufErrors|MemErrors)' /proc/net/snmp6
    soft grep Udp: /proc/net/snmp
    rdma statistic show link rxe0/1
}

rxe() { if _is_python "$@"; then _warm "" "$@"; else "$@"; fi; }
soft() { if _is_python "$@"; then _warm soft "$@"; else ip netns exec soft "$@"; fi; }
iwarp() { if _is_python "$@"; then _warm iwarp "$@"; else ip netns exec iwarp "$@"; fi; }

# Whether a command is "python3 ..." or "env NAME=VALUE... python3 ...".
_is_python() {
    if [ "$1" = env ]; then shift; while [[ $1 = [A-Z]*=* ]]; do shift; done; fi
    [ "$1" = python3 ]
}

# Run such a command in a namespace: a fork of the process that has imported everything (machine/warm.py).
_warm() {
    local order=/run/warm/$BASHPID-$SRANDOM pid
    printf '%s\0' "$BASHPID" "$1" "$PWD" "${@:2}" >"$order.args"
    echo "$order" >/run/warm/orders
    until [ -e "$order.pid" ]; do nap 0.01; done
    read -r pid <"$order.pid"
    # No command substitution in the trap: where it interrupts a "read" with a time limit, bash 5.2 may wait for ever.
    trap 'kill -TERM "$pid"' TERM
    until [ -e "$order.status" ]; do nap 0.01; done
    trap - TERM
    return "$(<"$order.status")"
}

serve_rxe() {
    if _is_python "$@"; then rxe "$@"; else exec "$@"; fi >/tmp/server.out 2>&1 &
    SERVER=$!
    _until_it_listens '[[ $(rdma resource show cm_id) == *LISTEN* ]]'
}

serve_soft() {
    soft "$@" >/tmp/server.out 2>&1 &
    SERVER=$!
    # The only process of the namespace has two hashed names when it listens: of its slot, and of its service id.
    local name='@rdmacm-4791-[0-9a-f][0-9a-f][0-9a-f]'
    _until_it_listens "[[ \$(</proc/\$(</run/warm/\$SERVER-*.pid)/net/unix) == *$name*$name* ]]"
}

pong_rxe() {
    if _is_python "$@"; then rxe "$@"; else exec "$@"; fi >/tmp/server.out 2>&1 &
    SERVER=$!
    _until_it_listens '[[ $(cat /proc/net/udp /proc/net/udp6) == *:1C06* ]]'
}

pong_soft() {
    soft "$@" >/tmp/server.out 2>&1 &
    SERVER=$!
    _until_it_listens "[[ \$(cat /proc/\$(</run/warm/\$SERVER-*.pid)/net/udp{,6}) == *:1C06* ]]"
}

_until_it_listens() {
    local i
    for ((i = 0; i < 3000; i++)); do
        eval "$1" 2>/dev/null && return
        runs "$SERVER" || break
        nap 0.01
    done
    echo "the server does not listen:"
    cat /tmp/server.out
    return 1
}

finish() {
    local now until
    read -r now _ </proc/uptime
    until=$((${now%.*} + 60))
    while runs "$SERVER" && ((${now%.*} < until)); do
        nap 0.01
        read -r now _ </proc/uptime
    done
    if runs "$SERVER"; then
        echo "the server does not end"
        # Either its program still runs, or the shell that waits for the program has not seen its end.
        grep -s . /run/warm/*.pid /run/warm/*.status
        cut -d " " -f 1-3 /proc/[0-9]*/stat 2>/dev/null | grep python
        kill "$SERVER"
    fi
    wait "$SERVER"
    SERVER_STATUS=$?
    cat /tmp/server.out
    return "$SERVER_STATUS"
}

# librdmacm's rping closes its event channel while its other thread waits there. If that thread sees it, it ends the
# program with 255. The status of a client is as random.
finish_rping() { finish || [ "$SERVER_STATUS" = 255 ]; }

# record FILE, then recorded: capture the packets of the link in between. In immediate mode, as tcpdump otherwise reads
# packets up to a second late. Each packet then takes -s bytes of the buffer of -B KiB.
record() {
    : >/tmp/tcpdump.err
    tcpdump -i va -Z root -U --immediate-mode -s 8192 -B 98304 -w "$1" 'udp port 4791' 2>>/tmp/tcpdump.err &
    RECORDER=$!
    until [[ $(</tmp/tcpdump.err) == *listening*bytes ]]; do runs "$RECORDER" || return; nap 0.01; done
    # The kernel counts what it received before tcpdump set its filter, too.
    _recorder_counts
    UNFILTERED=$((RECEIVED - CAPTURED))
}

# Waits until tcpdump has read what it received: at its end it would lose the rest.
recorded() {
    local i
    for ((i = 0; i < 500; i++)); do
        _recorder_counts
        ((RECEIVED - CAPTURED <= UNFILTERED)) && break
        nap 0.01
    done
    ((RECEIVED - CAPTURED <= UNFILTERED && DROPPED == 0)) ||
        echo "the recording is incomplete: captured $CAPTURED of $RECEIVED, dropped $DROPPED"
    kill -INT "$RECORDER"
    wait "$RECORDER"
}

# tcpdump's counts of packets: read, received by the filter, and dropped by the kernel. Its signal handler prints them,
# even in the middle of another message, which damages both texts: then it is asked again.
_recorder_counts() {
    local i said=
    local line='([0-9]+) packets? captured, ([0-9]+) packets? received by filter, ([0-9]+) packets? dropped by kernel'
    for ((i = 0; ; i++)); do
        if ((i % 100 == 0)); then
            : >/tmp/tcpdump.err
            kill -USR1 "$RECORDER"
        fi
        # bash leaves out null bytes, and warns of them.
        { said=$(</tmp/tcpdump.err); } 2>/dev/null
        [[ $said =~ $line ]] && break
        runs "$RECORDER" || return
        nap 0.01
    done
    CAPTURED=${BASH_REMATCH[1]} RECEIVED=${BASH_REMATCH[2]} DROPPED=${BASH_REMATCH[3]}
}
