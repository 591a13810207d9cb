# The host of the differential tests. For bash inside the machine, after net.sh:
#
#     links                     network(), and a second link with a device, "wa"; an interface without one, named "7"
#                               and with index 70; secondary addresses, gateways, routes that refuse, neighbours
#     ask MODULE ARGUMENTS...   run interop.differential or interop.differential_ids there, with its files in /etc
#     no_links                  undo links

links() {
    local kind ip gid nought=0000:0000:0000
    network
    ip address add 10.0.0.9/24 dev va
    ip address add fd00:0:0:1::9/64 dev va nodad
    ip address add fe80::1/64 dev va nodad
    ip link add wa type veth peer name wb netns soft
    ip address add 10.1.0.1/24 dev wa
    ip address add fd01::1/64 dev wa nodad
    ip link set wa up
    ip -n soft link set wb up
    ip link add 7 index 70 type dummy
    ip address add 10.7.0.1/24 dev 7
    ip address add fd07::1/64 dev 7 nodad
    ip link set 7 up
    ip route add 10.9.0.0/16 via 10.0.0.2
    ip route add fd09::/64 via fd00:0:0:1::2
    ip route add 10.8.0.0/16 via 10.1.0.2 src 10.0.0.9
    ip route add fd08::/64 via fd01::2
    for kind in unreachable=66 blackhole=67 prohibit=68; do
        ip route add ${kind%=*} 10.${kind#*=}.0.0/16
        ip route add ${kind%=*} fd${kind#*=}::/64
    done
    for ip in 10.0.0.2 10.0.0.77 fd00:0:0:1::2 fe80::2; do
        ip neighbour replace $ip lladdr 02:00:00:00:00:0b dev va nud permanent
    done
    for ip in 10.1.0.2 fd01::2; do ip neighbour replace $ip lladdr 02:00:00:00:00:0b dev wa nud permanent; done
    rdma link add rxe1 type rxe netdev wa
    for gid in 0/0a00:0001 0/0a00:0009 0/0001:$nought:0009 0/fe80:$nought:$nought:0001 1/0a01:0001 1/fd01; do
        until grep -qs ${gid#*/} /sys/class/infiniband/rxe${gid%/*}/ports/1/gids/?; do nap 0.02; done
    done
    mkdir -p /run/differential
    PYTHONPATH=/project/src:/project/tests python3 -m interop.differential files /run/differential
}

ask() {
    PYTHONPATH=/project/src:/project/tests unshare -m bash -c '
        for file in /run/differential/*; do mount --bind "$file" "/etc/${file##*/}"; done
        exec python3 -m "interop.$1" "${@:2}"' ask "$@"
}

no_links() {
    rdma link delete rxe1
    ip link delete wa
    ip link delete 7
    local kind
    for kind in 66 67 68; do
        ip route delete 10.$kind.0.0/16
        ip route delete fd$kind::/64
    done
    no_network
}
