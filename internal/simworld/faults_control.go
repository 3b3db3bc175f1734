package main

const (
	hubFile    = "internal/control/hub.go"
	memberFile = "internal/control/member.go"
)

// controlFaults are faults of the hub and its members.
var controlFaults = []fault{
	// ---- lost and silent ranks
	{"a lost connection is nobody's fault", hubFile,
		"	if p.left == \"\" {\n		reason :=", "	if false {\n		reason :=", ""},
	{"a silent rank is not noticed", hubFile,
		"p.left == \"\" && now.Sub(p.heard) > h.o.Silence {", "p.left == \"\" && false {", ""},
	{"a rank is silent too soon", hubFile,
		"now.Sub(p.heard) > h.o.Silence {", "now.Sub(p.heard) > h.o.Silence/4 {", ""},
	{"messages are no sign of life", hubFile, "	p.heard = time.Now()\n	if m.Call", "	if m.Call", ""},
	{"the hub's last beat is not noted", hubFile, "	h.beaten = now\n", "", ""},
	{"a member's last beat is not noted", memberFile, "		last = now\n", "		_ = last\n", ""},
	{"a member finds the hub silent too soon", memberFile,
		"		if silence > m.o.Silence {", "		if silence > m.o.Silence/5 {", ""},
	{"a member does not note the hub's messages", memberFile, "	h.heard = time.Now()\n", "", ""},
	{"a member sends no beats", memberFile,
		"		case m.out <- message{Kind: kindBeat}:\n		default: // the", "		default: // the", ""},
	{"the hub sends no beats", hubFile, "		h.send(r, message{Kind: kindBeat})\n", "		_ = r\n", ""},
	{"a beat has no calls", hubFile,
		"		p.calls, p.callAt = m.Calls, p.heard\n	case kindArrive",
		"		p.callAt = p.heard\n	case kindArrive", ""},
	{"a member sends its calls with no message", memberFile, "	msg.Calls = m.aged()\n", "", ""},
	// ---- the verdict
	{"the last rank does not get the verdict", hubFile,
		"for r := h.size - 1; r >= 0; r-- {", "for r := h.size - 2; r >= 0; r-- {", ""},
	{"rank 0 does not get the verdict", hubFile,
		"for r := h.size - 1; r >= 0; r-- {", "for r := h.size - 1; r > 0; r-- {", ""},
	{"a second verdict replaces a member's first", memberFile,
		"	if m.hub.verdict == nil && !m.closed {\n		m.hub.verdict = v\n		close(m.failed)\n	}",
		"	if m.hub.verdict == nil && !m.closed {\n		close(m.failed)\n	}\n	m.hub.verdict = v", ""},
	{"the hub closes connections at once", hubFile,
		"	if half, ok := conn.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {",
		"	if half, ok := conn.(interface{ CloseWrite() error }); false && ok && half.CloseWrite() == nil {", ""},
	// ---- joining
	{"a second process of a rank ends a job that has formed", hubFile,
		"		if !h.formed {\n", "		if true {\n", ""},
	{"the first process of a rank loses its place", hubFile,
		"	if p.out != nil {\n		text", "	if false {\n		text", ""},
	{"a job never counts as formed", hubFile, "	h.formed = h.formed || len(a.members) == h.size\n", "", ""},
}
