# A cluster of Ceph with a monitor and an OSD on 127.0.0.1; an object goes in, and comes back:
# cluster.sh DIRECTORY DEVICE true|false (whether by librdmacm; else by TCP, as Ceph does with InfiniBand)
set -e
cd "$1"
mkdir mon osd
id=$(cat /proc/sys/kernel/random/uuid)
cat >ceph.conf <<END
[global]
fsid = $id
mon_host = v2:127.0.0.1:3300
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_type = async+rdma
ms_async_rdma_device_name = $2
ms_async_rdma_cm = $3
ms_async_rdma_type = $($3 && echo iwarp || echo ib)
ms_bind_msgr1 = false
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
rados_mon_op_timeout = 60
rados_osd_op_timeout = 60
osd_objectstore = memstore
osd_pool_default_size = 1
mon_allow_pool_size_one = true
mon_data = $PWD/mon
osd_data = $PWD/osd
run_dir = $PWD
log_file = $PWD/\$name.log
END
export CEPH_CONF="$PWD/ceph.conf"
monmaptool --create --fsid "$id" --addv a "[v2:127.0.0.1:3300]" monmap
ceph-mon -i a --mkfs --monmap monmap
ceph-mon -i a -f &
daemons=$!
trap 'kill -9 $daemons' EXIT
trap exit TERM
id=$(cat /proc/sys/kernel/random/uuid)
ceph osd new "$id"
ceph-osd -i 0 --mkfs --osd-uuid "$id"
ceph-osd -i 0 -f &
daemons="$daemons $!"
ceph osd pool create pool 8
head -c 67108864 /dev/urandom >sent
rados -p pool put object sent
rados -p pool get object received
cmp sent received
echo done
