// A testee to start from (spec/testee-protocol.md):
//
//	go build -o testee template.go && boundary-bundle conformance -- ./testee
//
// Fill in the functions with your codec; what it cannot do stays skipped.
package main

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
)

type object = map[string]any

// Request has the fields of all requests. Integers of 64 bits are strings.
type Request struct {
	Seq              int64
	Cmd, Class, Data string
	Pieces           []int
	Limits           map[string]string
	RequireChecksums bool `json:"require_checksums"`
	Contract, Bundle json.RawMessage
}

var hello = object{"protocol": 1, "name": "template", "language": "Go", "version": "0",
	"classes": []string{"one", "core", "stream"}, // those that your codec has
	"dtypes":  []string{"f32", "i32"}}

// decode takes data in pieces of the sizes request.Pieces (nil: whole) with request.Class and returns
// "bundles", and "error" with "name", "number" and "offset" if there was one.
func decode(request *Request, data []byte) object { return object{"skipped": "no decoder yet"} }

// encode returns "data" in hexadecimal digits, or "error".
func encode(request *Request) object { return object{"skipped": "no encoder yet"} }

func answer(request *Request) (told object) {
	defer func() { // a fault of this program, not of the input
		if fault := recover(); fault != nil {
			told = object{"failed": fmt.Sprint(fault)}
		}
	}()
	switch request.Cmd {
	case "hello":
		return hello
	case "stop":
		return object{}
	case "decode", "stream":
		data, err := hex.DecodeString(request.Data)
		if err != nil {
			panic(err)
		}
		return decode(request, data)
	case "encode":
		return encode(request)
	}
	return object{"skipped": "unknown command " + request.Cmd}
}

func main() {
	in, out := json.NewDecoder(bufio.NewReader(os.Stdin)), json.NewEncoder(os.Stdout)
	for {
		var request Request
		if in.Decode(&request) != nil {
			return
		}
		told := object{"seq": request.Seq}
		for key, value := range answer(&request) {
			told[key] = value
		}
		if out.Encode(told) != nil || request.Cmd == "stop" {
			return
		}
	}
}
