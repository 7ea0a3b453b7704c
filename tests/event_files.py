"""Reads TensorBoard's event files by Python's standard library: TFRecords of protobuf messages."""
import glob
import struct

from checks import contents, crc32c


def require(ok, what):
    if not ok:
        raise ValueError(f"an event file: {what}")


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def fields(data):
    """The fields of a protobuf message: (number, value)."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(data, at)
        elif kind == 1:
            (value,), at = struct.unpack("<d", data[at : at + 8]), at + 8
        elif kind == 5:
            (value,), at = struct.unpack("<f", data[at : at + 4]), at + 4
        else:
            length, at = varint(data, at)
            value, at = data[at : at + length], at + length
        yield key >> 3, value


def doubles(data):
    return list(struct.unpack(f"<{len(data) // 8}d", data))


def bars(histogram):
    """The bars that TensorBoard makes of a HistogramProto: from, to, count."""
    limits, counts = doubles(histogram[6]), doubles(histogram[7])
    require(len(limits) == len(counts), "each bucket has its limit")
    require(limits == sorted(set(limits)), f"buckets do not overlap: {limits}")
    require(sum(counts) == histogram[3], f"each value is in a bucket: {counts}")
    return list(zip([histogram[1], *limits[:-1]], [*limits[:-1], histogram[2]], counts))


def events(path):
    data = contents(path)
    at = 0
    while at < len(data):
        head = data[at : at + 8]
        (length,), (crc,) = struct.unpack("<Q", head), struct.unpack("<I", data[at + 8 : at + 12])
        require(crc == masked(head), "a length has its checksum")
        body = data[at + 12 : at + 12 + length]
        require(struct.unpack("<I", data[at + 12 + length : at + 16 + length])[0] == masked(body), "data have theirs")
        at += 16 + length
        yield dict(fields(body))


def values(folder):
    """The values in a folder of event files: tag, step, and the fields of its message."""
    for path in sorted(glob.glob(f"{folder}/events.out.tfevents.*")):
        for event in events(path):
            if 5 in event:
                value = dict(fields(dict(fields(event[5]))[1]))
                yield value[1].decode(), event[2], value


def histograms(folder):
    """The fields of each HistogramProto, by tag and step."""
    return {(tag, step): dict(fields(value[5])) for tag, step, value in values(folder) if 5 in value}


def texts(folder):
    """The texts, by tag and step."""
    return {(tag, step): dict(fields(value[8]))[8].decode() for tag, step, value in values(folder) if 8 in value}
