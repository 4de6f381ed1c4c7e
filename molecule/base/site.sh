#!/bin/bash
# An authority, and a directory with TLS: lena of the group gpu has a public key, max is in no group.
set -euo pipefail
mkdir -p /root/site && cd /root/site
openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj '/CN=Site CA' -keyout ca.key -out ca.pem 2>/dev/null
openssl req -newkey rsa:2048 -nodes -subj '/CN=ldap.site.test' -keyout ldap.key -out ldap.csr 2>/dev/null
openssl x509 -req -in ldap.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 30 -out ldap.pem \
  -extfile <(echo 'subjectAltName=DNS:ldap.site.test') 2>/dev/null
install -o openldap -g openldap -m 600 ldap.key ldap.pem /etc/ldap/
for name in lena max; do ssh-keygen -q -t ed25519 -N '' -C "$name" -f "$name"; done

cat > lpk.ldif <<'LDIF'
dn: cn=openssh-lpk,cn=schema,cn=config
objectClass: olcSchemaConfig
cn: openssh-lpk
olcAttributeTypes: ( 1.3.6.1.4.1.24552.500.1.1.1.13 NAME 'sshPublicKey' EQUALITY octetStringMatch SYNTAX 1.3.6.1.4.1.1466.115.121.1.40 )
olcObjectClasses: ( 1.3.6.1.4.1.24552.500.1.1.2.0 NAME 'ldapPublicKey' SUP top AUXILIARY MAY ( sshPublicKey $ uid ) )
LDIF
cat > tls.ldif <<'LDIF'
dn: cn=config
changetype: modify
replace: olcTLSCertificateFile
olcTLSCertificateFile: /etc/ldap/ldap.pem
-
replace: olcTLSCertificateKeyFile
olcTLSCertificateKeyFile: /etc/ldap/ldap.key
LDIF
cat > suffix.ldif <<'LDIF'
dn: olcDatabase={1}mdb,cn=config
changetype: modify
replace: olcSuffix
olcSuffix: dc=site,dc=test
-
replace: olcRootDN
olcRootDN: cn=admin,dc=site,dc=test
-
replace: olcRootPW
olcRootPW: site
LDIF
sed -i 's|^SLAPD_SERVICES=.*|SLAPD_SERVICES="ldap:/// ldaps:/// ldapi:///"|' /etc/default/slapd
systemctl restart slapd
for file in lpk tls suffix; do
  tool=ldapmodify; [ $file = lpk ] && tool=ldapadd
  $tool -Q -Y EXTERNAL -H ldapi:/// -f $file.ldif
done
systemctl restart slapd
{
  printf 'dn: dc=site,dc=test\nobjectClass: dcObject\nobjectClass: organization\no: site\ndc: site\n\n'
  number=20001
  for name in lena max; do
    printf 'dn: uid=%s,dc=site,dc=test\nobjectClass: account\nobjectClass: posixAccount\nobjectClass: ldapPublicKey\n' $name
    printf 'uid: %s\ncn: %s\nuidNumber: %s\ngidNumber: 20000\nhomeDirectory: /nowhere\nloginShell: /bin/bash\n' $name $name $number
    printf 'sshPublicKey: %s\n\n' "$(cat $name.pub)"
    number=$((number + 1))
  done
  printf 'dn: cn=staff,dc=site,dc=test\nobjectClass: posixGroup\ncn: people\ncn: staff\ngidNumber: 20000\n\n'
  printf 'dn: cn=gpu,dc=site,dc=test\nobjectClass: posixGroup\ncn: gpu\ngidNumber: 20010\nmemberUid: lena\n'
} > people.ldif
ldapadd -x -D cn=admin,dc=site,dc=test -w site -H ldapi:/// -f people.ldif
mkdir -p /nfs/home/lena && chown 20001:20000 /nfs/home/lena
touch done
