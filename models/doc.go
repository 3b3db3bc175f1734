// Package models provides published networks with the definition, the names and the initialisation
// of their reference.
package models
