# shellcheck shell=bash
# Sourced after common.sh: functions that make another Debian in a folder, with debootstrap and chroot (root only).
[ "$(id -u)" = 0 ] || die "must run as root (debootstrap, chroot)"

# new_system SUITE FOLDER LOG : makes the system from the mirror that the host's apt uses, and first removes what FOLDER
# holds. LOG is the beginning of the names of the logs.
new_system() {
  local suite=$1 system=$2 log=$3 mirror
  command -v debootstrap >/dev/null ||
    quietly "$log-setup.log" "installing debootstrap" apt-get -q -y install --no-install-recommends debootstrap || return 1
  # The host's first Debian archive that is not the one for security.
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' |
    awk '$1 ~ /\/debian\/?$/ {print $1; exit}')
  [ -n "$mirror" ] || die "the apt sources name no Debian mirror"
  rm -rf "$system"
  mkdir -p "$system"
  echo "$(basename "$0"): debootstrap of $suite into $system"
  quietly "$log-debootstrap.log" "debootstrap" debootstrap --variant=minbase "$suite" "$system" "$mirror" || return 1
  # The index of a snapshot mirror has expired. apt still checks its signature.
  echo 'Acquire::Check-Valid-Until "false";' >"$system/etc/apt/apt.conf.d/90shardlib"
  cp /etc/resolv.conf /etc/hosts "$system/etc/"
  quietly "$log-update.log" "apt-get update in $suite" in_system "$system" apt-get -q update
}

# in_system FOLDER COMMAND... : runs the command in the chroot. It sees /proc, /sys, /dev/shm, our sources as /shardlib, and
# the folder $scratch, if it is set, as /scratch. /shardlib is read-only except build/, where scripts and tests keep data and
# logs. All mounts belong to a mount namespace that ends with the command, so none is left.
in_system() {
  unshare --mount --propagation private bash -euc '
    system=$1 source=$2 scratch=$3
    shift 3
    mount -t proc proc "$system/proc"
    mount -t sysfs -o ro sysfs "$system/sys"
    mkdir -p "$system/dev/shm" "$system/dev/pts" "$system/shardlib" "$system/scratch" "$source/build"
    mount -t tmpfs tmpfs "$system/dev/shm"
    mount -t devpts devpts "$system/dev/pts"
    mount --bind "$source" "$system/shardlib"
    mount -o remount,bind,ro "$system/shardlib"
    mount --bind "$source/build" "$system/shardlib/build"
    if [ -n "$scratch" ]; then mount --bind "$scratch" "$system/scratch"; fi
    exec chroot "$system" env -i HOME=/root TERM=dumb LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin \
      DEBIAN_FRONTEND=noninteractive OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
      PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 CCACHE_DIR=/var/cache/ccache "$@"
  ' in_system "$1" "$root" "${scratch:-}" "${@:2}"
}

# newer_system SUITE FOLDER LOG PACKAGE... : makes a system as new_system does, with the packages of setup.sh, the suite's own
# clang, and these packages.
newer_system() {
  rm -f "$2.ready"
  new_system "$1" "$2" "$3" || return 1
  newer_packages "$@" || return 1
  touch "$2.ready"
}

# newer_packages SUITE FOLDER LOG PACKAGE... : installs what newer_system installs. Of alternatives it takes the first that
# the suite has.
newer_packages() {
  local suite=$1 system=$2 log=$3 package one names=(clang libomp-dev "${@:4}")
  for package in $(scripts/setup.sh --list --test | grep -v '^clang-'); do
    for one in ${package//|/ }; do
      if in_system "$system" apt-cache show "$one" >/dev/null 2>&1; then break; fi
    done
    names+=("$one")
  done
  quietly "$log-install.log" "installing packages in $suite" \
    in_system "$system" apt-get -q -y install --no-install-recommends "${names[@]}"
}
