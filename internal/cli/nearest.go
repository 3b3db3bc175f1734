package cli

// Nearest returns the name closest to text. It returns "" if even for the closest name the edit
// distance is more than a third of the name's length.
func Nearest(names []string, text string) string {
	found, least := "", max(1, len(text)/3)+1
	for _, name := range names {
		if d := editDistance(name, text); d < least {
			found, least = name, d
		}
	}
	return found
}

// editDistance counts the insertions, deletions and substitutions of bytes, and the swaps of
// adjacent bytes, that turn one text into the other (the optimal string alignment distance).
func editDistance(a, b string) int {
	// table[i][j] is the distance between the first i bytes of a and the first j bytes of b.
	table := make([][]int, len(a)+1)
	for i := range table {
		table[i] = make([]int, len(b)+1)
		table[i][0] = i
	}
	for j := range table[0] {
		table[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			replaced := table[i-1][j-1]
			if a[i-1] != b[j-1] {
				replaced++
			}
			least := min(replaced, table[i-1][j]+1, table[i][j-1]+1)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				least = min(least, table[i-2][j-2]+1)
			}
			table[i][j] = least
		}
	}
	return table[len(a)][len(b)]
}
