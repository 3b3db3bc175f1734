package archive

import "io"

// ReadForward skips to the content of a later member and fills p with it, without parsing headers.
// m has the member's name, shard and offset from an index. position is its ordinal, from 1, for
// error messages. ReadForward inflates everything between the last read and the end of p, so
// checksums are still verified.
//
// heads holds the skipped bytes right before the content, for [Heads]: all of them, or at least the
// last HeaderBytes. They are valid until the next read. The members of a zip, a directory or a
// Parquet file have no tar headers, so heads is nil for them. In a Parquet file, m.Page and
// m.Offset together give the position of the content.
func (a *Archive) ReadForward(position int, m *Member, p []byte) (heads []byte, err error) {
	if a.ctx.Err() != nil {
		return nil, ErrStopped
	}
	a.member.position, a.member.name = position, m.Name
	for a.at.index < m.Shard {
		if err := a.finishShard(); err != nil {
			return nil, err
		}
	}
	if a.at.tree != nil {
		if err := readFile(a.at.tree.root, m.Name, p); err != nil {
			return nil, a.Fail(err)
		}
		return nil, nil
	}
	if a.at.zip != nil {
		if err := a.at.zip.readAt(m.Offset, p); err != nil {
			return nil, a.Fail(err)
		}
		return nil, nil
	}
	if a.at.table != nil {
		if err := a.at.table.readAt(m.Page, m.Offset, p); err != nil {
			return nil, a.Fail(err)
		}
		return nil, nil
	}
	if heads, err = a.skipTo(m.Offset); err != nil {
		return nil, err
	}
	if _, err := io.ReadFull(a.at.in, p); err != nil {
		return nil, a.Fail(err)
	}
	return heads, nil
}

// ReadToEnd reads to the end of the last shard, to verify all remaining checksums.
func (a *Archive) ReadToEnd() error {
	for a.at.index+1 < len(a.shards) {
		if err := a.finishShard(); err != nil {
			return err
		}
	}
	return a.finishShard()
}

// skipTo skips to an offset of the shard's tar stream, without parsing headers. It returns the last
// skipped bytes.
func (a *Archive) skipTo(offset int64) (last []byte, err error) {
	for a.at.in.offset < offset {
		n := offset - a.at.in.offset
		if n > skipBytes { // leaves at least HeaderBytes for the last piece
			n = min(skipBytes, n-HeaderBytes)
		}
		last = a.room()[:n]
		if _, err := io.ReadFull(a.at.in, last); err != nil {
			return nil, a.Fail(err)
		}
	}
	return last, nil
}

// finishShard reads to the end of the shard, to verify its checksum, and moves to the next shard,
// if any.
func (a *Archive) finishShard() error {
	for a.at.tree == nil && a.at.zip == nil && a.at.table == nil {
		if _, err := a.at.in.Read(a.room()); err == io.EOF {
			break
		} else if err != nil {
			return a.Fail(err)
		}
	}
	if err := a.advance(); err != io.EOF {
		return err
	}
	return nil
}
